"""Laws of runs that end with a stream: it is delivered completely, and the last batch is padded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.chapters import Chapter
from streampack.config import Order, Packing
from streampack.errors import ConfigError
from streampack.plan.drain import drained
from streampack.plan.sequence import PackSequence
from streampack.plan.state import Progress
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM
from tests.helpers.chapters import device_packs, plan_packs, run_packs, run_plan, views_of
from tests.helpers.examples import examples

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
RNG = np.random.default_rng(0)
WEB = RNG.integers(1, 150, 900)
STREAMS = {
    "many": RNG.integers(1, 200, 700),
    "few": RNG.integers(1, 60, 7),  # its order is shared by all lanes
    "uneven": np.where(np.arange(120) % 30 == 7, 1500, 10),
}
SIZE, RUN = 8, 2


pytestmark = pytest.mark.usefixtures("small_chunks")


def plan_of(tune, chapters, method, *, passes=1, num_lanes=1, overflow="split"):
    chapters = [
        replace(chapter, packing=chapter.packing and replace(chapter.packing, overflow=overflow))
        for chapter in chapters
    ]
    plan = run_plan(
        {"web": WEB, "tune": tune},
        chapters,
        method=method,
        packing=Packing(max_seq_len=64, overflow=overflow),
        order=Order(seed=3, pack_shuffle=32),
        num_lanes=num_lanes,
        lane_turn=RUN,
        global_batch_size=SIZE,
        max_passes={"tune": Fraction(passes)},
        on_exhausted="end",
    )
    return drained(plan.recipes, "tune")


def tokens_of(packs, stream=1):
    """The tokens of a stream's samples, by pass and sample."""
    got: Counter = Counter()
    for _, _, rows in packs:
        for row in rows:
            if row[STREAM] == stream:
                got[row[PASS], row[SAMPLE]] += row[LENGTH]
    return got


RUNS = {
    "alone": [Chapter(weights={"tune": 1})],
    "with web": [Chapter(weights={"web": 1, "tune": 1})],
    "last": [Chapter(weights={"web": 1}, steps=3), Chapter(weights={"tune": 1})],
    "last, longer packs": [
        Chapter(weights={"web": 3, "tune": 1}, steps=2),
        Chapter(weights={"tune": 3, "web": 1}, packing=Packing(max_seq_len=128)),
    ],
}


@examples(60)
@given(
    tune=st.sampled_from(sorted(STREAMS)),
    run=st.sampled_from(sorted(RUNS)),
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([1, 2, 4]),
    passes=st.sampled_from([1, 2]),
)
def test_the_last_chapter_delivers_each_sample_of_its_passes(tune, run, method, num_lanes, passes):
    lengths = STREAMS[tune]
    plan = plan_of(lengths, RUNS[run], method, passes=passes, num_lanes=num_lanes)
    packs = run_packs(plan, [RUN] * len(plan))
    got = tokens_of(packs)
    by_sample: Counter = Counter()
    for (_, sample), tokens in got.items():
        by_sample[sample] += tokens
    assert by_sample == {n: passes * length for n, length in enumerate(lengths.tolist())}
    if run == "alone" and method != "per_stream" and passes == 1:
        # Only the last turns of lanes and the last global batch have padding.
        empty = sum(not rows for _, _, rows in packs)
        assert empty <= num_lanes * (RUN - 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", sorted(RUNS))
@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_cut_samples_are_delivered_too(run, method, overflow):
    lengths = STREAMS["many"]
    plan = plan_of(lengths, RUNS[run], method, num_lanes=2, overflow=overflow)
    samples = {sample for _, sample in tokens_of(run_packs(plan, [RUN] * len(plan)))}
    longest = 128 if run == "last, longer packs" else 64
    all_of_them = set(range(len(lengths)))
    kept = set(np.flatnonzero(lengths <= longest).tolist()) if overflow == "drop" else all_of_them
    if run == "last, longer packs":  # some were dropped in the chapter before
        assert kept - samples <= set(np.flatnonzero(lengths > 64).tolist())
    else:
        assert samples == kept


@examples(30)
@given(
    tune=st.sampled_from(sorted(STREAMS)),
    run=st.sampled_from(sorted(RUNS)),
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([1, 2, 4]),
    num_devices=st.sampled_from([2, 4]),
)
def test_every_world_gets_the_same_packs_to_the_end(tune, run, method, num_lanes, num_devices):
    plan = plan_of(STREAMS[tune], RUNS[run], method, num_lanes=num_lanes)
    one = run_packs(plan, [RUN] * len(plan))
    assert run_packs(plan, [RUN] * len(plan), num_devices) == one
    assert run_packs(plan, [RUN] * len(plan), num_devices, most=8) == one


@examples(30)
@given(
    tune=st.sampled_from(sorted(STREAMS)),
    run=st.sampled_from(sorted(RUNS)),
    method=st.sampled_from(METHODS),
    num_lanes=st.sampled_from([1, 2]),
    part=st.floats(0, 1),
    is_bare=st.booleans(),
)
def test_a_resume_anywhere_gives_the_rest(tune, run, method, num_lanes, part, is_bare):
    plan = plan_of(STREAMS[tune], RUNS[run], method, num_lanes=num_lanes)
    (views,) = views_of([RUN] * len(plan), 1)
    sequence, got = PackSequence(plan, views), []
    num_batches = sum(chapter.num_slots for chapter in plan.chapters) // RUN
    for _ in range(int(part * num_batches)):
        step = sequence.next()
        got += plan_packs(step, views[step.epoch])
    at = (sequence.epoch, sequence.position)
    snapshots = [] if is_bare else sequence.snapshots()
    start = Progress(epoch=at[0], position=at[1], snapshots=snapshots)
    walk = None if is_bare else sequence.walk_state(*at)
    rest = device_packs(PackSequence(plan, views, start, walk=walk), views)
    assert got + rest == run_packs(plan, [RUN] * len(plan))


@pytest.mark.parametrize("method", METHODS)
def test_the_mixture_stays_until_the_stream_ends(method):
    plan = plan_of(STREAMS["many"], RUNS["with web"], method, num_lanes=2)
    packs = run_packs(plan, [RUN])
    shares = [
        sum(row[STREAM] for _, _, rows in part for row in rows if row[START] == 0)
        / max(sum(row[START] == 0 for _, _, rows in part for row in rows), 1)
        for part in (packs[: len(packs) // 2], packs[len(packs) // 2 :])
    ]
    assert min(shares) > 0.3
    assert max(shares) < 0.6
    sequence = PackSequence(plan, views_of([RUN], 1)[0])
    while sequence.next() is not None:
        pass
    assert sequence.totals.substituted == 0


def test_a_stream_without_samples_ends_no_run_before_it_begins():
    with pytest.raises(ConfigError, match="leaves no sample"):
        plan_of(STREAMS["few"], RUNS["alone"], "stratified", passes=Fraction(1, 100))
    plan_of(STREAMS["few"], RUNS["alone"], "stratified", passes=1)
