"""`Mixing(max_repeats=...)`: what runs are expected to take of a stream, and what they take."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from streampack.chapters import Chapter, Ramp
from streampack.config import Order, Packing
from streampack.errors import ConfigError
from streampack.plan.repeats import check_repeats
from streampack.types import LENGTH, STREAM
from tests.helpers.chapters import LENGTHS, run_packs, run_plan

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
CHAPTERS = [
    Chapter(weights={"web": 3, "math": 1}, steps=24),
    Chapter(
        weights={"web": Ramp(3, 1), "math": Ramp(1, 3)},
        steps=12,
        packing=Packing(max_seq_len=128),
    ),
]

pytestmark = pytest.mark.usefixtures("small_chunks")


def plan_of(chapters=CHAPTERS, most=None, lengths=LENGTHS, **options):
    options = {"order": Order(seed=3, pack_shuffle=32), "num_lanes": 1, **options}
    return run_plan(lengths, chapters, lane_turn=2, max_repeats=most, **options)


def number_of(chapters=CHAPTERS, **options) -> float:
    """The times that a refusal names."""
    with pytest.raises(ConfigError, match="max_repeats allows") as caught:
        check_repeats(plan_of(chapters, {"math": 0.001}, **options).recipes)
    return float(re.search(r"'math' ([\d.]+) times in the lane", str(caught.value))[1])


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_takes_a_stream_as_often_as_its_refusal_says(method, unit):
    number = number_of(method=method, unit=unit)
    packs = run_packs(plan_of(method=method, unit=unit), [2, 2])
    taken = sum(row[LENGTH] for *_, rows in packs for row in rows if row[STREAM] == 2)
    assert number > 1.5
    assert taken / LENGTHS["math"].sum() == pytest.approx(number, rel=0.1)
    # The way out that the message names; all streams, or this one alone.
    for most in (number, {"math": number}):
        check_repeats(plan_of(most=most, method=method, unit=unit).recipes)
    for most in (number - 0.02, {"math": number - 0.02}):
        with pytest.raises(ConfigError, match=f"'math' {number:g} times .* raise max_repeats"):
            check_repeats(plan_of(most=most, method=method, unit=unit).recipes)


def test_the_lane_with_the_fewest_tokens_counts():
    """Lanes hold as many bytes, and serve as many packs; but one has samples that are truncated."""
    lengths = {"math": np.repeat([320, 32], [20, 200]), "web": np.full(400, 10)}
    chapters = [Chapter(weights={"math": 1, "web": 1}, steps=40)]
    options = {
        "lengths": lengths,
        "num_lanes": 2,
        "method": "stratified",
        "packing": Packing(max_seq_len=32, overflow="truncate"),
        "order": Order(seed=3, shuffle=False),
        "shard_size": 20,
    }
    number = number_of(chapters, **options)
    packs = run_packs(plan_of(chapters, **options), [2])
    uses = Counter(row[2] for *_, rows in packs for row in rows if not row[STREAM] and not row[3])
    assert number == 40 * 8 / 2 * 32 / (2 * 20 * 32)
    assert max(uses.values()) == pytest.approx(number, abs=1)
    assert sum(uses.values()) / 220 < number / 2
    assert number_of([Chapter(weights={"math": 1}, passes=3)], **options) == 3


def test_streams_that_all_lanes_share_and_those_without_a_share_are_counted_too():
    lengths = {**LENGTHS, "math": LENGTHS["math"][:20]}
    one, four = (number_of(lengths=lengths, num_lanes=num) for num in (1, 4))
    assert one == four
    check_repeats(plan_of(most={"other": 0.01, "code": 0.01}).recipes)


def test_runs_without_an_end_and_unknown_streams_are_refused_and_passes_are_counted():
    first, last = CHAPTERS[0], Chapter(weights={"web": 1})
    with pytest.raises(ConfigError, match=r"no end.*; give the last chapter steps"):
        check_repeats(plan_of([first, last], 1000).recipes)
    check_repeats(plan_of([first, replace(last, steps=1)], 1000).recipes)
    check_repeats(plan_of([first, last], {"math": 1000}).recipes)  # it rests in the last
    with pytest.raises(ConfigError, match=r"'maths', and the streams .* did you mean 'math'"):
        check_repeats(plan_of(most={"maths": 2}).recipes)
    passes = [replace(first, weights={"web": 1}, steps=4), Chapter(weights={"math": 1}, passes=3)]
    assert number_of(passes) == 3
    check_repeats(plan_of(passes, 3).recipes)
