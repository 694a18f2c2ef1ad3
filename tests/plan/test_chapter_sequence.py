"""Laws of plans with chapters: cursors, shares, edges, worlds and resumes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.chapters import Chapter
from streampack.config import Order, Packing
from streampack.plan.lane_stream import LaneStream
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM
from tests.helpers.chapters import (
    LENGTHS,
    drawn_segments,
    run_packs,
    run_plan,
    some_chapters,
    views_of,
)
from tests.helpers.examples import examples

NAMES = ["web", "code", "math"]
STREAMS = {name: LENGTHS[name] for name in NAMES}
SIZE = 16  # packs of a global batch
EXAMPLES = examples(25)


pytestmark = pytest.mark.usefixtures("small_chunks")


methods = st.sampled_from(["random", "stratified", "device_per_stream", "per_stream"])
shapes = {
    "run": some_chapters(NAMES),
    "method": methods,
    "unit": st.sampled_from(["samples", "tokens"]),
    "num_lanes": st.sampled_from([1, 2, 4]),
    "window": st.sampled_from([0, 64]),
}


def make(run, method: str, unit: str, num_lanes: int, window: int) -> RunPlan:
    return run_plan(
        STREAMS,
        run,
        method=method,
        unit=unit,
        order=Order(seed=3, pack_shuffle=window),
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=SIZE,
    )


def sizes(run) -> list[int]:
    return [2] * len(run)


@EXAMPLES
@given(**shapes)
def test_in_a_lane_no_sample_is_drawn_again_before_all_were(run, method, unit, num_lanes, window):
    """Delivered and waiting segments together are the first draws of each stream, each once."""
    plan = make(run, method, unit, num_lanes, window)
    [views] = views_of(sizes(run), 1)
    segments = drawn_segments(PackSequence(plan.seen(views)), views)
    for stream in range(len(NAMES)):
        own = segments[segments[:, STREAM] == stream]
        drawn: Counter = Counter()
        for row in own.tolist():
            drawn[row[PASS], row[SAMPLE]] += row[LENGTH]
        total = STREAMS[NAMES[stream]]
        # Each is complete, and no token comes twice.
        assert all(tokens == total[sample] for (_, sample), tokens in drawn.items())
        starts = Counter((row[PASS], row[SAMPLE], row[START]) for row in own.tolist())
        assert max(starts.values(), default=1) == 1
        for lane in range(num_lanes):
            of_lane = LaneStream(plan.recipes[0], stream, lane)
            if of_lane.is_empty or of_lane._shares is None:
                continue
            taken = of_lane.take(0, 3 * len(total))
            order = [(row[PASS], row[SAMPLE]) for row in taken.tolist()]
            is_drawn = [key in drawn for key in order]
            assert is_drawn == sorted(is_drawn, reverse=True)


@EXAMPLES
@given(
    num_samples=st.integers(2, 60),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    method=methods,
    num_lanes=st.sampled_from([2, 4, 8]),
    window=st.sampled_from([0, 64]),
)
def test_lanes_share_a_small_stream_evenly(num_samples, weights, method, num_lanes, window):
    """Each lane draws every num_lanes-th element of a common order, once, from the beginning."""
    rng = np.random.default_rng(num_samples)
    own = {"web": STREAMS["web"], "tiny": rng.integers(1, 60, num_samples)}
    plan = run_plan(
        own,
        [Chapter(weights={"web": 9, "tiny": weight}, steps=6) for weight in weights],
        method=method,
        order=Order(seed=3, pack_shuffle=window),
        num_lanes=num_lanes,
        lane_turn=2,
        global_batch_size=SIZE,
    )
    [views] = views_of([2] * len(weights), 1)
    segments = drawn_segments(PackSequence(plan.seen(views)), views)
    drawn = {(row[PASS], row[SAMPLE]) for row in segments.tolist() if row[STREAM] == 1}
    draws = []
    for lane in range(num_lanes):
        taken = LaneStream(plan.recipes[0], 1, lane).take(0, 4000)
        order = [(row[PASS], row[SAMPLE]) for row in taken.tolist()]
        is_drawn = [key in drawn for key in order]
        assert is_drawn == sorted(is_drawn, reverse=True)
        draws.append(sum(is_drawn))
    uses = Counter(sample for _, sample in drawn)
    differ = max(uses.values(), default=0) - min(uses[sample] for sample in range(num_samples))
    # As docs/chapters.md states.
    assert differ <= 2 + num_lanes * (max(draws) - min(draws)) / num_samples


@pytest.mark.parametrize("window", [0, 64])
def test_long_samples_of_a_stream_that_left_stay_counted(window):
    """Without its queues, the count of lost tokens would drop to 0 when a stream leaves."""
    run = [Chapter(weights={name: 1}, steps=4) for name in ("web", "code", "web")]
    plan = run_plan(
        STREAMS,
        run,
        packing=Packing(max_seq_len=64, overflow="drop"),
        order=Order(seed=3, pack_shuffle=window),
    )
    [views] = views_of([4] * len(run), 1)
    sequence, counts = PackSequence(plan.seen(views)), [[], [], []]
    while (batch := sequence.next()) is not None:
        counts[batch.epoch].append(sequence.totals.dropped[0])
    first, without, again = counts
    assert first[-1] > 0
    assert set(without) == {first[-1]}
    assert again[-1] > first[-1]


@examples(40)
@given(
    run=some_chapters(NAMES),
    method=st.sampled_from(["stratified", "device_per_stream"]),
    num_lanes=st.sampled_from([1, 2, 4]),
)
def test_after_each_global_batch_streams_are_within_a_choice_of_their_share(run, method, num_lanes):
    plan = make(run, method, "samples", num_lanes, 0)
    per_choice = 2 if method == "device_per_stream" else 1
    packs = run_packs(plan, sizes(run))
    for number, recipe in enumerate(plan.recipes):
        chapter, size = recipe.chapter, recipe.global_batch_size
        streams = [rows[0][STREAM] for of, _, rows in packs if of == number]
        before = plan.start(number).schedule.lags / 2**32
        for stop in range(size, len(streams) + 1, size):
            counts = np.bincount(streams[:stop], minlength=3) / per_choice
            part = stop / chapter.num_slots
            due = [
                stop / per_choice * float(a + (b - a) * part / 2)
                for a, b in zip(chapter.begin, chapter.end, strict=True)
            ]
            assert np.abs(counts - due - before).max() < 1 + 1e-6
