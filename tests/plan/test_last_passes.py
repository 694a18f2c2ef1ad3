"""Laws of a last chapter of whole passes: each sample is delivered, the last batch is padded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.chapters import Chapter
from streampack.config import Order, Packing
from streampack.errors import ConfigError
from streampack.plan.reader import num_parts
from streampack.plan.sequence import PackSequence
from streampack.plan.state import Progress
from streampack.types import LENGTH, PASS, SAMPLE, STREAM
from tests.helpers.chapters import device_packs, plan_packs, run_packs, run_plan, views_of
from tests.helpers.examples import crossed, examples

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


def plan_of(tune, run, method, *, passes=1, num_lanes=1, overflow="split", unit="samples"):
    *before, last = (
        replace(chapter, packing=chapter.packing and replace(chapter.packing, overflow=overflow))
        for chapter in RUNS[run]
    )
    return run_plan(
        {"web": WEB, "tune": tune},
        [*before, replace(last, passes=passes)],
        method=method,
        unit=unit,
        packing=Packing(max_seq_len=64, overflow=overflow),
        order=Order(seed=3, pack_shuffle=32),
        num_lanes=num_lanes,
        lane_turn=RUN,
        global_batch_size=SIZE,
    )


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
    "last": [Chapter(weights={"web": 1}, steps=3), Chapter(weights={"tune": 1})],
    "last, longer packs": [
        Chapter(weights={"web": 1}, steps=2),
        Chapter(weights={"tune": 1}, packing=Packing(max_seq_len=128), global_batch_size=16),
    ],
}

RUN_OF = {
    "tune": st.sampled_from(sorted(STREAMS)),
    "run": st.sampled_from(sorted(RUNS)),
    "method": st.sampled_from(METHODS),
    "num_lanes": st.sampled_from([1, 2, 4]),
}


@examples(15, many=60)
@given(
    **RUN_OF,
    passes=st.sampled_from([1, 2]),
    unit=st.sampled_from(["samples", "tokens"]),
)
def test_the_last_chapter_delivers_each_sample_of_its_passes(
    tune, run, method, num_lanes, passes, unit
):
    lengths = STREAMS[tune]
    plan = plan_of(lengths, run, method, passes=passes, num_lanes=num_lanes, unit=unit)
    packs = run_packs(plan, [RUN] * len(plan))
    got = tokens_of(packs)
    by_sample: Counter = Counter()
    for (_, sample), tokens in got.items():
        by_sample[sample] += tokens
    assert by_sample == {n: passes * length for n, length in enumerate(lengths.tolist())}
    assert {chapter for chapter, *_ in packs} == set(range(len(plan)))
    if run == "alone" and method != "per_stream" and passes == 1:
        # Only the last turns of lanes and the last global batch have padding.
        empty = sum(not rows for _, _, rows in packs)
        assert empty <= num_lanes * (RUN - 1)


@pytest.mark.parametrize(
    ("method", "run", "overflow"), crossed(METHODS, sorted(RUNS), ["truncate", "drop"])
)
def test_cut_samples_are_delivered_too(run, method, overflow):
    lengths = STREAMS["many"]
    plan = plan_of(lengths, run, method, num_lanes=2, overflow=overflow)
    samples = {sample for _, sample in tokens_of(run_packs(plan, [RUN] * len(plan)))}
    longest = 128 if run == "last, longer packs" else 64
    kept = lengths <= longest if overflow == "drop" else lengths > 0
    assert samples == set(np.flatnonzero(kept).tolist())


@examples(8, many=30)
@given(
    **RUN_OF,
    num_devices=st.sampled_from([2, 4]),
)
def test_every_world_gets_the_same_packs_to_the_end(tune, run, method, num_lanes, num_devices):
    plan = plan_of(STREAMS[tune], run, method, num_lanes=num_lanes)
    one = run_packs(plan, [RUN] * len(plan))
    assert num_parts(plan) == 1  # lanes run dry
    assert run_packs(plan, [RUN] * len(plan), num_devices) == one
    assert run_packs(plan, [RUN] * len(plan), num_devices, most=8) == one


@examples(10, many=30)
@given(
    **RUN_OF,
    part=st.floats(0, 1),
    is_bare=st.booleans(),
)
def test_a_resume_anywhere_gives_the_rest(tune, run, method, num_lanes, part, is_bare):
    plan = plan_of(STREAMS[tune], run, method, num_lanes=num_lanes)
    (views,) = views_of([RUN] * len(plan), 1)
    sequence, got = PackSequence(plan.seen(views)), []
    num_batches = sum(chapter.num_slots for chapter in plan.chapters) // RUN
    for _ in range(int(part * num_batches)):
        step = sequence.next()
        got += plan_packs(step, views[step.epoch])
    at = (sequence.epoch, sequence.position)
    snapshots = [] if is_bare else sequence.snapshots()
    start = Progress(epoch=at[0], position=at[1], snapshots=snapshots)
    rest = device_packs(PackSequence(plan.seen(views), start), views)
    assert got + rest == run_packs(plan, [RUN] * len(plan))


def test_passes_without_a_sample_are_refused():
    long = np.full(50, 65)
    for run, number in (("alone", 0), ("last", 1)):
        with pytest.raises(ConfigError, match=rf"chapters\[{number}\] .* stream 'tune', .* left"):
            plan_of(long, run, "stratified", overflow="drop")
        plan_of(long, run, "stratified", overflow="truncate")
