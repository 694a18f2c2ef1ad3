"""A run of five chapters over the demo's three streams of real text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from streampack import (
    Chapter,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Ramp,
    Stream,
    World,
)
from streampack.cli import demo
from streampack.cli.config import read_config
from streampack.cli.demo.show import write_streams
from streampack.plan.lane_stream import LaneStream
from streampack.plan.sequence import PackSequence
from streampack.report.chapters import chapter_engine_of
from streampack.types import SAMPLE, START, STREAM
from tests.helpers.chapters import drawn_segments

CONFIG = Path(demo.__file__).with_name("demo.yaml")
SIZE, LANES = 16, 2
CHAPTERS = [
    Chapter(weights={"code": 0.25, "manuals": 0.2, "docstrings": 0.55}, steps=20),
    Chapter(weights={"docstrings": Ramp(0.8, 0.2), "code": Ramp(0.2, 0.8)}, steps=30),
    Chapter(
        weights={"manuals": 0.7, "docstrings": 0.3}, steps=20, packing=Packing(max_seq_len=4096)
    ),
    Chapter(weights={"docstrings": 1}, steps=15),
    Chapter(weights={"code": 0.4, "manuals": Ramp(0.6, 0.3), "docstrings": Ramp(0, 0.3)}, steps=25),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_streams(read_config(CONFIG), folder / "demo-output", Console(quiet=True))
    return folder / "demo-output" / "streams"


@pytest.mark.slow
def test_samples_of_a_lane_are_drawn_equally_often_and_shares_are_as_written(folder):
    names = ["code", "manuals", "docstrings"]
    dataset = PackedStreamingDataset(
        [Stream(name=name, local=str(folder / name)) for name in names],
        packing=Packing(max_seq_len=2048),
        chapters=CHAPTERS,
        mixing=Mixing(global_batch_size=SIZE, batching_method="stratified"),
        order=Order(seed=17, num_lanes=LANES, pack_shuffle=0),
        batch_size=1,
        world=World(),
    )
    drawn: dict[tuple[str, int], Counter] = {}  # uses of samples, by stream and pass
    chosen: dict[int, list[str]] = {number: [] for number in range(len(CHAPTERS))}
    for batch in PackedDataLoader(dataset):
        rows = batch["segments"].tolist()
        [stream] = {row[1] for row in rows}  # a pack of `stratified` is of one stream
        chosen[batch["epoch"]].append(names[stream])
        for _, _, of_pass, sample, start, _ in rows:
            if start == 0:
                drawn.setdefault((names[stream], of_pass), Counter())[sample] += 1
    behind = dict.fromkeys(names, 0.0)
    for number, chapter in enumerate(CHAPTERS):
        own, first, last = chosen[number], chapter.shares(), chapter.shares(at_end=True)
        assert len(own) == chapter.steps * SIZE
        for stop in range(SIZE, len(own) + 1, SIZE):
            part = stop / len(own)
            for name in names:
                begin, end = float(first.get(name, 0)), float(last.get(name, 0))
                due = stop * (begin + (end - begin) * part / 2) + behind[name]
                assert abs(own[:stop].count(name) - due) < 2
    assert all(max(counts.values()) == 1 for counts in drawn.values())
    # What a lane drew; some of that is still in its packers, so deliveries may differ by more.
    engine = chapter_engine_of(dataset)
    views = engine._views
    segments = drawn_segments(PackSequence(engine.run, views), views)
    uses = Counter((row[STREAM], row[SAMPLE]) for row in segments.tolist() if row[START] == 0)
    recipe = engine.run.recipes[0]
    for number in range(len(names)):
        lanes = [
            set(LaneStream(recipe, number, lane).take(0, 10_000)[:, SAMPLE].tolist())
            for lane in range(LANES)
        ]
        assert sum(map(len, lanes)) == len(set.union(*lanes))  # a sample is in one lane
        for lane in lanes:
            own = [uses[number, sample] for sample in lane]
            assert max(own) - min(own) <= 1
