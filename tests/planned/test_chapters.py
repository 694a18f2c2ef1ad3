"""Runs of chapters through loaders: worlds, workers, resumes, edits, amendments and refusals."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torch.utils.data import DataLoader

from streampack import (
    Chapter,
    ConfigError,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Ramp,
    ResumeError,
    Stream,
    World,
    report,
)
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.streams import open_stream
from tests.helpers.builders import write_stream_files
from tests.helpers.datasets import state_after
from tests.helpers.examples import crossed

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
# For tests of what does not depend on the method.
SOME_METHODS = [
    "random",
    "device_per_stream",
    *(pytest.param(method, marks=pytest.mark.slow) for method in ("stratified", "per_stream")),
]
CONFIGS = Path(__file__).parents[2] / "configs"
CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=6),
    Chapter(weights={"web": Ramp(3, 1), "math": Ramp(0, 2)}, steps=5),
    Chapter(
        weights={"math": 1, "web": 1, "code": 1},
        steps=5,
        packing=Packing(max_seq_len=128),
        batch_size=1,
        global_batch_size=8,
    ),
    Chapter(weights={"code": 1, "math": 1}, steps=4),
]
EDGES = [48, 88, 128]  # batches before a chapter, on one rank


@pytest.fixture
def make(make):
    return lambda chapters=CHAPTERS, **options: make(chapters, **options)


def key(batch: dict[str, Any]) -> tuple[int, int, bytes]:
    return batch["epoch"], batch["position"], batch["tokens"].numpy().tobytes()


def keys(batches) -> list:
    return [key(batch) for batch in batches]


@pytest.mark.parametrize("method", ["stratified", "device_per_stream"])
def test_a_loop_continues_after_break_and_ends_with_the_run(make, method):
    whole = keys(PackedDataLoader(make(method=method)))
    assert len(whole) == len(make(method=method)) == 8 * 15 + 8 * 5
    loader, got = PackedDataLoader(make(method=method)), []
    while True:
        before = len(got)
        for batch in loader:
            got.append(key(batch))
            if len(got) == before + 37:
                break
        if len(got) == before:
            break
    assert got == whole
    assert keys(make(method=method)) == whole


@pytest.mark.processes
def test_persistent_workers_of_torch_begin_at_a_state_that_is_loaded(make):
    whole = keys(make(CHAPTERS[:2]))
    dataset = make(CHAPTERS[:2])
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first = list(islice(loader, 37))
    for batch in (first[-1], first[4]):
        dataset.load_state_dict(dataset.state_after(batch))
        assert keys(loader) == whole[whole.index(key(batch)) + 1 :]


def test_a_copy_by_pickle_continues_a_loop_that_was_left(make):
    dataset = make()
    got = keys(islice(dataset, 37))
    copied = pickle.loads(pickle.dumps(dataset))
    assert keys(copied) == keys(dataset) == keys(make())[len(got) :]


@pytest.mark.processes
def test_workers_deliver_the_same_and_resume_at_every_edge(make):
    whole = keys(PackedDataLoader(make()))
    loader = PackedDataLoader(make(), num_workers=2)
    states, got = {}, []
    for batch in loader:
        got.append(key(batch))
        if len(got) in {edge + near for edge in EDGES for near in (-1, 0, 1)}:
            states[len(got)] = json.dumps(loader.state_dict())
    assert got == whole
    for number, state in states.items():
        # With workers one batch after each edge; each runs over the edge that follows.
        resumed = PackedDataLoader(make(), num_workers=2 if number - 1 in EDGES else 0)
        resumed.load_state_dict(json.loads(state))
        wanted = whole[number : number + 48]
        assert keys(islice(resumed, len(wanted))) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("method", SOME_METHODS)
def test_an_amendment_at_an_edge_does_not_depend_on_what_was_planned_ahead(make, method):
    runs = []
    for is_ahead in (False, True):
        # No threads, since one of them would plan at the same time as the test.
        loader, got = PackedDataLoader(make(method=method), prefetch_threads=0), []
        for batch in loader:
            got.append(key(batch))
            if len(got) == EDGES[0]:
                engine = loader._loading.engine
                while is_ahead and engine.state.current.epoch == 0:
                    engine.state.current.next()  # like a thread that reads ahead
                loader.amend(weights={"math": 1, "web": 1})
        runs.append(got)
    assert runs[0] == runs[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("stratified", 10),
        ("stratified", 48),
        ("stratified", 52),
        ("random", 137),
        *(pytest.param("random", at, marks=pytest.mark.slow) for at in (10, 48, 52)),
        pytest.param("stratified", 137, marks=pytest.mark.slow),
    ],
)
def test_an_amendment_changes_nothing_that_was_delivered_and_is_replayed(make, method, at):
    whole = keys(PackedDataLoader(make(method=method)))
    loader, got, states = PackedDataLoader(make(method=method)), [], {}
    for batch in loader:
        got.append(key(batch))
        if len(got) == at:
            loader.amend(weights={"math": 1, "web": 1})
        if len(got) in (at, at + 20):
            states[len(got)] = json.dumps(loader.state_dict())
    assert [b for _, _, b in got[:at]] == [b for _, _, b in whole[:at]]
    assert len(got) == len(whole)
    assert got != whole
    for number, state in states.items():
        resumed = PackedDataLoader(make(method=method))
        resumed.load_state_dict(json.loads(state))
        assert keys(resumed) == got[number:]


@pytest.mark.parametrize("method", METHODS)
def test_an_amendment_holds_from_the_next_global_batch_on(make, method):
    loader, seen = PackedDataLoader(make([Chapter(weights={"web": 1}, steps=9)], method=method)), []
    for batch in loader:
        seen.append(set(batch["segments"][:, 1].tolist()))
        if len(seen) == 13:
            loader.amend(weights={"code": 1})
    assert seen == 16 * [{0}] + 56 * [{1}]


def test_an_amendment_before_the_first_batch_of_a_loop_is_kept_though_the_loop_ends(make):
    weights = [{"code": 1}]

    def amending(batch):  # as a signal handler may
        while weights:
            loader.amend(weights=weights.pop())
        return batch

    run = make([Chapter(weights={"web": 1}, steps=2)], batch_format=amending)
    loader = PackedDataLoader(run, prefetch_threads=0)
    with pytest.raises(ConfigError, match="amended or skipped; it would continue"):
        next(iter(loader))
    assert [set(batch["segments"][:, 1].tolist()) for batch in loader] == 16 * [{1}]


@pytest.mark.parametrize("at", [41, 47, 87])
def test_a_chapter_is_not_amended_in_its_last_global_batch_but_in_the_next_chapter(make, at):
    loader = PackedDataLoader(make())
    for number, _ in enumerate(loader, start=1):
        if number == at:
            with pytest.raises(ConfigError, match=r"chapters\[\d\] ends with this global batch"):
                loader.amend(weights={"math": 1, "web": 1})
        if number == at + 8:
            loader.amend(weights={"math": 1, "web": 1})
    assert len(loader.state_dict()["chapters"]) == 5


@pytest.mark.parametrize("change", [{"skip": 2}, {"amend": {"weights": {"web": 1, "code": 2}}}])
def test_iterators_of_loaders_follow_a_change_of_the_run_and_others_end_with_an_error(make, change):
    [(method, value)] = change.items()
    arguments = value if method == "amend" else {"steps": value}
    dataset = make(CHAPTERS[:2])
    before = iter(dataset)
    next(before)
    getattr(PackedDataLoader(dataset), method)(**arguments)
    with pytest.raises(ConfigError, match=r"was amended or skipped; .*begin a new one"):
        next(before)

    followed = []
    for is_other in (False, True):
        dataset = make(CHAPTERS[:2])
        loader = PackedDataLoader(dataset)
        batches = iter(loader)
        next(batches)
        getattr(PackedDataLoader(dataset) if is_other else loader, method)(**arguments)
        followed.append(keys(batches))
    assert followed[0] == followed[1] != keys(PackedDataLoader(make(CHAPTERS[:2])))[1:]


def test_an_open_run_has_no_length_and_goes_on(make):
    dataset = make([CHAPTERS[0], Chapter(weights={"math": 1})])
    with pytest.raises(TypeError, match="no end"):
        len(dataset)
    batches = [key(batch) for _, batch in zip(range(500), PackedDataLoader(dataset), strict=False)]
    assert len(batches) == 500


def test_a_description_names_what_a_chapter_changes_and_what_was_edited_since_a_state(make):
    first, second = Chapter(weights={"web": 1}, steps=2), {"web": 1, "code": 1}
    before = make([first, Chapter(weights=second, steps=2)])
    packing = Packing(max_seq_len=128, max_samples_per_pack=4)
    after = make([first, Chapter(weights=second, steps=3, packing=packing)])
    described = report.describe_run(after, state_after(PackedDataLoader(before), 1))
    chapter = described["chapters"][1]
    assert sorted(chapter["changes"]) == ["+code", "max_samples_per_pack", "max_seq_len"]
    assert sorted(chapter["edits"]) == ["packing", "steps"]


@pytest.mark.parametrize("method", ["random", "stratified"])
def test_a_run_is_described_before_it_runs(make, method):
    state = state_after(PackedDataLoader(make(method=method)), 60)
    described = report.describe_run(make(method=method), state)
    chapters = described["chapters"]
    assert [chapter["first_step"] for chapter in chapters] == [0, 6, 11, 16]
    assert described["stands_at"] == {"chapter": 1, "step": 1}
    assert [chapter["edits"] for chapter in chapters] == [[], [], [], []]
    assert chapters[1]["streams"]["math"]["begin"] == 0
    assert chapters[1]["streams"]["math"]["end"] == pytest.approx(2 / 3)
    assert "+math" in chapters[1]["changes"]
    assert [chapter["steps"] for chapter in chapters] == [6, 5, 5, 4]
    first = report.simulate(make(method=method), steps=EDGES[0])["streams"]
    key = {"random": "share_samples", "stratified": "share_tokens"}[method]
    for name, stream in chapters[0]["streams"].items():
        assert first[name][key] == pytest.approx(stream["begin"], abs=0.1)
    counts = dict.fromkeys(("web", "code", "math"), 0)
    loader = PackedDataLoader(make(method=method))
    for _ in loader:
        pass
    for chapter in chapters:
        for name, stream in chapter["streams"].items():
            counts[name] += stream["tokens"]
    delivered = loader.stats()["streams"]
    for name, expected in counts.items():
        # With "random", within the deviation expected for a few dozen draws from each stream.
        most = 0.2 if method == "random" else 0.1
        assert delivered[name]["tokens"] == pytest.approx(expected, rel=most)


def test_an_amended_chapter_until_an_amount_still_ends_there(make):
    tokens = 5 * 16 * 64  # of five steps, with eight batches each
    chapters = [Chapter(weights=WEB, until=tokens), Chapter(weights=MATH, steps=2)]
    loader = PackedDataLoader(make(chapters))
    batches = iter(loader)
    for _ in range(16):
        next(batches)
    loader.amend(weights=CODE)
    assert 16 + len(list(batches)) == 8 * 7


def test_a_run_is_simulated_as_it_is_delivered(make):
    loader = PackedDataLoader(make(skip=[(3, 4)]))
    for _ in loader:
        pass
    delivered = loader.stats()
    simulated = report.simulate(make(skip=[(3, 4)]), steps=10_000)
    assert simulated["fill"] == delivered["fill"]
    assert simulated["skipped"] == delivered["skipped"] == 2
    for name, stream in delivered["streams"].items():
        assert simulated["streams"][name]["tokens"] == stream["tokens"]
    assert len(report.simulate(make())["chapters"]) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["annealing", "length-curriculum"])
def test_the_configs_of_chapters_load_and_are_planned(folders, tmp_path, name):
    written = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    own = iter(folders.values())
    for stream in written["streams"]:
        del stream["remote"]
        stream["local"] = next(own)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(written))
    dataset = build_dataset(read_config(path), path, World())
    described = report.describe_run(dataset)
    assert len(described["chapters"]) == len(written["chapters"])
    batch = next(iter(PackedDataLoader(dataset)))
    assert batch["tokens"].shape[1] == described["chapters"][0]["max_seq_len"]


@pytest.mark.parametrize("has_lengths", [False, True])
def test_shards_that_were_appended_are_taken_beside_the_old_ones(tmp_path, has_lengths):
    options = {"lengths_file": has_lengths}
    merged, _ = write_stream_files(tmp_path / "merged", [50] * 200, **options)
    stops = open_stream(Stream(local=merged), 0).first_sample
    num_old = len(stops) // 2
    old, _ = write_stream_files(tmp_path / "old", [50] * int(stops[num_old]), **options)

    def dataset(*streams, chapters):
        return PackedStreamingDataset(
            list(streams),
            packing=Packing(max_seq_len=64),
            chapters=chapters,
            mixing=Mixing(global_batch_size=4, batching_method="stratified"),
            order=Order(seed=17),
            world=World(),
        )

    before = Chapter(weights={"web": 1}, steps=5)
    first = [dataset(Stream(name="web", local=old), chapters=[before]) for _ in range(2)]
    state, whole = state_after(PackedDataLoader(first[0]), 7), keys(PackedDataLoader(first[1]))
    alone = dataset(Stream(name="web", local=merged), chapters=[before])
    with pytest.raises(ResumeError, match=r"only=slice\(0, n\)"):
        alone.load_state_dict(state)
    both = dataset(
        Stream(local=merged, only=slice(0, num_old), name="web"),
        Stream(local=merged, only=slice(num_old, None), name="web2"),
        chapters=[before, Chapter(weights={"web": 1, "web2": 1}, steps=5)],
    )
    both.load_state_dict(state)
    loader = PackedDataLoader(both)
    assert keys(loader)[:13] == whole[7:]
    assert loader.stats()["streams"]["web2"]["samples"] > 0


def ended(folders, *more: Chapter, passes: int | None = 1) -> PackedStreamingDataset:
    """A run that ends with passes through `math`, or after 10 steps with it."""
    last = {"passes": passes} if passes else {"steps": 10}
    return PackedStreamingDataset(
        [Stream(name=name, local=folders[name]) for name in ("web", "math")],
        packing=Packing(max_seq_len=64),
        chapters=[
            Chapter(weights={"web": 1}, steps=6),
            *more,
            Chapter(weights={"math": 1}, **last),
        ],
        mixing=Mixing(global_batch_size=8),
        order=Order(seed=17, num_lanes=2),
        batch_size=2,
        world=World(),
    )


def test_a_run_that_ends_with_passes_is_described_with_them_and_its_steps(folders):
    for passes in (1, 3):
        described = report.describe_run(ended(folders, passes=passes))
        assert described["chapters"][1]["streams"]["math"]["passes"] == passes
        steps = sum(chapter["steps"] for chapter in described["chapters"])
        assert steps * 4 == len(ended(folders, passes=passes))


def test_passes_are_not_amended_nor_begun_before_and_the_run_goes_on(folders):
    loader, got = PackedDataLoader(ended(folders)), []
    for batch in loader:
        got.append(key(batch))
        if len(got) == 10:
            with pytest.raises(
                ConfigError, match=r"\[1\] gives a weight to 'math', .* second Stream"
            ):
                loader.amend(weights={"web": 1, "math": 1})
            loader.amend(weights={"web": 2})
        elif len(got) == 30:
            with pytest.raises(ConfigError, match=r"chapters\[2\] takes whole passes"):
                loader.amend(weights={"web": 1})
            state = json.loads(json.dumps(loader.state_dict()))
    assert len(got) == len(ended(folders))
    for other in (ended(folders, passes=None), ended(folders, passes=2)):
        with pytest.raises(ResumeError, match=r"chapters\[2\] ran with passes=1, but this run has"):
            other.load_state_dict(state)
    resumed = PackedDataLoader(ended(folders))
    resumed.load_state_dict(state)
    assert keys(resumed) == got[30:]


def test_passes_begin_at_the_first_sample_also_of_a_second_stream_of_its_data(folders):
    both = Chapter(weights={"web": 1, "math": 1}, steps=4)
    with pytest.raises(
        ConfigError, match=r"chapters\[1\] gives a weight to 'math', .* another name"
    ):
        ended(folders, both)
    dataset = PackedStreamingDataset(
        [Stream(name=name, local=folders[name[:4]]) for name in ("math", "math2")],
        packing=Packing(max_seq_len=64),
        chapters=[Chapter(weights={"math": 1}, steps=4), Chapter(weights={"math2": 1}, passes=1)],
        mixing=Mixing(global_batch_size=8),
        batch_size=2,
    )
    loader = PackedDataLoader(dataset)
    assert len(list(loader)) == len(dataset)
    assert loader.stats()["streams"]["math2"]["samples"] == 90


def test_a_run_that_is_amended_to_repeat_more_is_refused_and_goes_on(make):
    both, limit = [Chapter(weights={"web": 9, "math": 1}, steps=12)], {"max_repeats": {"math": 1}}
    loader, same = (PackedDataLoader(make(both, mixing=own)) for own in (limit, {}))
    got = []
    for batch in loader:
        got.append(key(batch))
        if len(got) == 10:
            with pytest.raises(ConfigError, match=r"'math' [2-9]\.\d* times .* allows 1"):
                loader.amend(weights={"math": 1})
        elif len(got) == 20:
            same.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            loader.amend(weights={"web": 1})
    # Neither what was refused nor the limit changes the run.
    assert got[:20] + keys(same) == keys(PackedDataLoader(make(both)))
    assert loader.stats()["streams"]["math"]["samples"] < 90


@pytest.fixture(scope="module")
def long_and_short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long_and_short")
    for name, size, num in (("a", 768, 300), ("b", 64, 1400)):
        write_stream_files(folder / name, [size] * num)
    return folder


@pytest.mark.parametrize(
    ("method", "unit"),
    [
        *crossed(["random", "stratified"], ["samples", "tokens"]),
        ("device_per_stream", "tokens"),
        pytest.param("per_stream", "tokens", marks=pytest.mark.slow),
    ],
)
def test_targets_are_the_mean_shares_of_the_chapters_delivered(long_and_short, method, unit):
    chapters = [
        Chapter(weights={"a": 0.7, "b": 0.3}, steps=20),
        Chapter(weights={"a": Ramp(0.2, 0.6), "b": Ramp(0.8, 0.4)}, steps=30),
    ]

    def make(skip=()):
        return PackedStreamingDataset(
            [Stream(name=name, local=str(long_and_short / name)) for name in "ab"],
            packing=Packing(max_seq_len=256),
            chapters=chapters,
            skip=skip,
            mixing=Mixing(global_batch_size=16, batching_method=method, weight_unit=unit),
            batch_size=2,
            world=World(),
        )

    def target(loader):
        return loader.stats()["streams"]["a"]["target"]

    compared = unit if method == "random" else "tokens"
    loader = PackedDataLoader(make())
    assert target(loader) == pytest.approx(0.7)
    seen, amounts = [], np.zeros(2)
    for batch in loader:
        rows = batch["segments"].numpy()
        amount = rows[:, 5].sum() if compared == "tokens" else (rows[:, 4] == 0).sum()
        middle = (batch["position"] - 1) / (30 * 16)
        asked = 0.2 + 0.4 * middle if batch["epoch"] else 0.7
        amounts += amount * np.array([asked, 1])
        seen.append(target(loader))
    assert target(loader) == pytest.approx(amounts[0] / amounts[1], abs=0.005)
    assert seen[8 * 20 - 1] == pytest.approx(0.7)
    if method in ("stratified", "device_per_stream"):
        assert target(loader) == pytest.approx(0.52, abs=0.01)
        delivered = loader.stats()["streams"]["a"][f"share_{compared}"]
        assert delivered == pytest.approx(target(loader), abs=0.01)
    simulated = report.simulate(make(), steps=10_000)["streams"]["a"]
    assert simulated["target"] == pytest.approx(target(loader), abs=0.005)
    # Skipped steps do not count.
    loader = PackedDataLoader(make(skip=[(20, 49)]))
    list(loader)
    assert target(loader) == pytest.approx(0.7)


EDGE = [
    Chapter(weights={"web": 1}, steps=3),
    Chapter(weights={"web": 1}, steps=2, packing=Packing(max_seq_len=128)),
    Chapter(weights={"web": 1}, steps=3),
]


@pytest.mark.parametrize(
    ("skip", "overflow"),
    crossed(
        [[(2, 2)], [(3, 4)], [(0, 2)], [(4, 5)], [(6, 7)], [(0, 7)], [(1, 3), (7, 7)]],
        ["split", "drop"],
    ),
)
def test_skipped_steps_are_counted_at_edges_and_in_whole_chapters(make, skip, overflow):
    chapters = [
        replace(chapter, packing=chapter.packing and replace(chapter.packing, overflow=overflow))
        for chapter in EDGE
    ]
    packing = Packing(max_seq_len=64, overflow=overflow)
    whole = keys(PackedDataLoader(make(chapters, packing=packing)))
    loader = PackedDataLoader(make(chapters, packing=packing, skip=skip))
    gone = {step for first, last in skip for step in range(first, last + 1)}
    assert keys(loader) == [one for n, one in enumerate(whole) if n // 8 not in gone]
    assert loader.stats()["skipped"] == len(gone)
    assert report.simulate(make(chapters, packing=packing, skip=skip), steps=100)["skipped"] == len(
        gone
    )


def amended_state(make, chapters, calls, until):
    """The state after `until` batches of a run that was amended on the way."""
    loader = PackedDataLoader(make(chapters))
    for number, _ in enumerate(loader, start=1):
        if number in calls:
            loader.amend(weights=calls[number])
        if number == until:
            return json.loads(json.dumps(loader.state_dict()))
    raise AssertionError(number)


WEB, CODE, MATH = {"web": 1}, {"code": 1}, {"math": 1}


def plain(*lengths):
    return [Chapter(weights=weights, steps=steps) for weights, steps in lengths]


EDITED = [
    ([(WEB, 20), (MATH, 4)], [5, 15, 4]),
    ([(WEB, 25), (MATH, 2)], [5, 20, 2]),
    ([(WEB, 10), (MATH, 4)], [5, 5, 4]),
    ([(WEB, 5), (CODE, 15), (MATH, 4)], [5, 15, 4]),
    ([(WEB, 5), (CODE, 6), (MATH, 4)], [5, 6, 4]),
    ([(WEB, 5), (CODE, 17), (MATH, 4)], [5, 17, 4]),
    ([(WEB, 5), (CODE, 17)], [5, 17]),
]


@pytest.mark.parametrize(("edited", "until"), crossed(EDITED, [37, 40, 64]))
def test_an_amended_run_is_edited_in_the_original_and_in_the_written_chapters(make, edited, until):
    edited, expected = edited
    state = amended_state(make, plain((WEB, 20), (MATH, 4)), {37: CODE}, until)
    loader = PackedDataLoader(make(plain(*edited)))
    loader.load_state_dict(state)
    weights = [WEB, CODE, MATH][: len(expected)]
    whole = keys(PackedDataLoader(make(plain(*zip(weights, expected, strict=True)))))
    assert keys(loader) == whole[until:]


def test_skips_that_are_past_or_beyond_the_run_are_logged(make, caplog):
    make(skip=[(3, 4), (19, 19)])
    assert not caplog.text  # the run has 20 steps
    make(skip=[(18, 20)])
    assert "skip has steps 18 to 20, and the run still has steps 0 to 19, counted" in caplog.text
    state = state_after(PackedDataLoader(make(skip=[(1, 1)])), 20)  # step 3 has begun
    caplog.clear()
    make(skip=[(4, 5)]).load_state_dict(state)
    assert not caplog.text
    make(skip=[(3, 4)]).load_state_dict(state)
    assert "skip has steps 3 to 4, and the run still has steps 4 to 19, counted" in caplog.text
    # The way out.
    earlier = state_after(PackedDataLoader(make()), 20)
    caplog.clear()
    loader = PackedDataLoader(make(skip=[(3, 4)]))
    loader.load_state_dict(earlier)
    assert not caplog.text
    loader.skip(100)
    assert "the run still has steps 3 to 19" in caplog.text
