"""Laws of streams that run out in runs of chapters: `Stream(max_passes=...)`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.chapters import Chapter
from streampack.config import Order, Packing
from streampack.errors import ConfigError, DataError
from streampack.plan.pass_limits import check_limits
from streampack.plan.sequence import PackSequence
from streampack.types import PASS, START, STREAM
from tests.helpers.chapters import device_packs, run_packs, run_plan, views_of
from tests.helpers.examples import examples

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
RNG = np.random.default_rng(0)
LENGTHS = {
    "web": RNG.integers(1, 150, 400),
    "code": RNG.integers(1, 300, 150),
    "math": RNG.integers(1, 60, 90),
    "tiny": RNG.integers(1, 60, 5),  # its order is shared by all lanes
}
RUN = 2
SIZE = 8


pytestmark = pytest.mark.usefixtures("small_chunks")


def plan_of(run, passes, method="stratified", overflow="split", num_lanes=2, unit="samples"):
    chapters = [
        replace(chapter, packing=chapter.packing and replace(chapter.packing, overflow=overflow))
        for chapter in run
    ]
    return run_plan(
        LENGTHS,
        chapters,
        method=method,
        unit=unit,
        packing=Packing(max_seq_len=64, overflow=overflow),
        order=Order(seed=3, pack_shuffle=32),
        num_lanes=num_lanes,
        lane_turn=RUN,
        global_batch_size=SIZE,
        max_passes=passes,
    )


@st.composite
def chapters(draw) -> list[Chapter]:
    """Chapters of all streams, so that the limited ones run out and web takes their place."""
    return [
        Chapter(
            weights={name: draw(st.integers(1, 5)) for name in LENGTHS},
            steps=draw(st.integers(1, 12)),
            packing=draw(
                st.sampled_from([None, None, Packing(max_seq_len=128), Packing(max_seq_len=32)])
            ),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


passes = st.fixed_dictionaries(
    {
        name: st.sampled_from([Fraction(1, 3), Fraction(1, 2), Fraction(1), Fraction(3, 2)])
        for name in ("code", "math", "tiny")
    }
)


@examples(60)
@given(
    run=chapters(),
    passes=passes,
    method=st.sampled_from(METHODS),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
    num_lanes=st.sampled_from([1, 2, 4]),
)
def test_limited_streams_give_way_and_no_pack_is_empty(run, passes, method, overflow, num_lanes):
    packs = run_packs(plan_of(run, passes, method, overflow, num_lanes), [RUN] * len(run))
    assert len(packs) == sum(chapter.steps for chapter in run) * SIZE
    assert all(rows for _, _, rows in packs)
    used = {tuple(row[: START + 1]) for _, _, rows in packs for row in rows if row[START] == 0}
    uses = Counter((stream, sample) for stream, _, sample, _ in used)
    for number, name in enumerate(LENGTHS):
        most = math.ceil(passes.get(name, 10**9))
        own = [count for (stream, _), count in uses.items() if stream == number]
        assert max(own, default=0) <= most


@examples(40)
@given(run=chapters(), passes=passes, is_global=st.booleans(), num_lanes=st.sampled_from([1, 2, 4]))
def test_batches_of_one_stream_stay_so_where_streams_run_out(run, passes, is_global, num_lanes):
    method, size = ("per_stream", SIZE) if is_global else ("device_per_stream", RUN)
    packs = run_packs(plan_of(run, passes, method, num_lanes=num_lanes), [RUN] * len(run))
    streams: dict[tuple[int, int], set[int]] = {}
    for chapter, slot, rows in packs:
        streams.setdefault((chapter, slot // size), set()).update(row[STREAM] for row in rows)
    assert all(len(own) == 1 for own in streams.values())


BOTH = Chapter(weights={"web": 1, "math": 1}, steps=30)
ONLY = Chapter(weights={"math": 1}, steps=2)


@pytest.mark.parametrize("method", METHODS)
def test_a_chapter_that_would_have_no_packs_is_refused_at_the_start(method):
    most = {"math": Fraction(1)}
    for run, number in (([replace(ONLY, steps=9)], 0), ([BOTH, ONLY], 1)):
        plan = plan_of(run, most, method)
        with pytest.raises(
            ConfigError, match=rf"chapters\[{number}\] takes \d+ tokens, .*; shorten it"
        ):
            check_limits(plan.recipes)
        # The ways out.
        raised = plan_of(run, {"math": Fraction(100)}, method)
        shorter = [replace(chapter, steps=1) for chapter in run[:1]]
        joined = [replace(chapter, weights={"web": 1, "math": 1}) for chapter in run]
        for better in (raised, plan_of(shorter, most, method), plan_of(joined, most, method)):
            check_limits(better.recipes)
            steps = sum(chapter.num_slots for chapter in better.chapters) // SIZE
            assert len(run_packs(better, [RUN] * len(run))) == steps * SIZE


@pytest.mark.parametrize("method", METHODS)
def test_a_chapter_without_packs_is_an_error_and_not_an_endless_walk(method):
    run = [BOTH, replace(ONLY, steps=20), BOTH]
    plan = plan_of(run, {"math": Fraction(1)}, method)
    with pytest.raises(DataError, match=r"chapters\[1\] has no packs left .*'math'.* max_passes"):
        run_packs(plan, [RUN] * 3)
    if method != "random":  # there, the counts do not track samples
        with pytest.raises(DataError, match=r"chapters\[1\] has no packs left .*'math'"):
            plan.start(2)


@pytest.mark.parametrize("method", METHODS)
def test_a_chapter_is_taken_if_it_uses_all_but_the_last_packs(method):
    most = {"math": Fraction(3)}
    for steps in range(40, 0, -1):
        plan = plan_of([replace(ONLY, steps=steps)], most, method)
        try:
            check_limits(plan.recipes)
        except ConfigError:
            continue
        break
    assert steps > 10
    packs = run_packs(plan, [RUN])
    assert len(packs) == steps * SIZE
    assert max(row[PASS] for _, _, rows in packs for row in rows) == 2


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_draws_that_give_way_are_counted_once_over_all_devices(unit, num_devices):
    run = [replace(BOTH, steps=40), Chapter(weights={"web": 3, "math": 1, "code": 1}, steps=20)]

    def counted(passes):
        plan = plan_of(run, passes, "random", unit=unit)
        total, draws, n = 0, 0, len(plan.recipes[0].streams)
        for views in views_of([RUN] * 2, num_devices):
            sequence = PackSequence(plan, views)
            device_packs(sequence, views, 8)
            total += sequence.totals.substituted
            for queue in sequence._queues:
                if queue._lane % views[1].num_devices == views[1].place:
                    draws += sum(queue.windows.arrivals.state()[3 + n : 3 + 2 * n])
        return total, draws

    assert counted({}) == (0, counted({})[1])
    total, draws = counted({"math": Fraction(1, 2)})
    # The 45 samples of math soon run out; then half and later a fifth of the draws are replaced.
    assert draws / 5 < total < draws / 2
    total, _ = counted({"math": Fraction(100)})
    assert total == 0
