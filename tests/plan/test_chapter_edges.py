"""If packs mix streams, a chapter delivers its own shares from its first step on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from streampack.chapters import Chapter, Ramp
from streampack.config import Order, Packing
from streampack.mix.draw import CHUNK
from streampack.plan.sample_order import UNDELIVERED, SampleOrder
from streampack.plan.spans import RunPlan
from streampack.types import LENGTH, PASS, STREAM, TOTAL
from tests.helpers.chapters import run_packs, run_plan
from tests.helpers.examples import crossed

NAMES = ["web", "code", "rare"]
SIZE, LANES, SEQ = 32, 4, 2048


def lengths(num: int = 20_000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    means = {"web": 500, "code": 900, "rare": 200}
    return {
        name: np.clip(np.exp(rng.normal(np.log(mean), 1, num)), 1, 20_000).astype(int)
        for name, mean in means.items()
    }


def plan_of(run: Sequence[Chapter], **options) -> RunPlan:
    return run_plan(
        options.pop("lengths", None) or lengths(),
        run,
        method="random",
        packing=options.pop("packing", Packing(max_seq_len=SEQ)),
        num_lanes=LANES,
        lane_turn=8,
        global_batch_size=SIZE,
        **options,
    )


def delivered(plan: RunPlan, num_chapters: int) -> list[np.ndarray]:
    """Segment rows of each chapter."""
    packs = run_packs(plan, [8] * num_chapters, most=64)
    rows: list[list] = [[] for _ in range(num_chapters)]
    for chapter, _, own in packs:
        rows[chapter] += own
    return [np.array(own) for own in rows]


def parts_of(segments: np.ndarray, unit: str) -> np.ndarray:
    """The samples of each stream in some segments; a piece counts as a fraction of its sample."""
    weights = segments[:, LENGTH] / (segments[:, TOTAL] if unit == "samples" else 1)
    return np.bincount(segments[:, STREAM], weights, minlength=len(NAMES))


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("order", "unit"), crossed([Order(), Order(pack_shuffle=0)], ["tokens", "samples"])
)
def test_each_chapter_delivers_its_own_shares(steps, order, unit):
    """As docs/chapters.md states: up to chance in the window that ends it, and to the packer's
    buffer."""
    shares = [[0.88, 0.1, 0.02], [0.08, 0.9, 0.02], [0.5, 0.48, 0.02]]
    run = [Chapter(weights=dict(zip(NAMES, own, strict=True)), steps=steps) for own in shares]
    plan = plan_of(run, order=order, unit=unit)
    window = plan.recipes[0].sizes(0, 0).max_samples or CHUNK
    for own, segments in zip(shares, delivered(plan, 3), strict=True):
        parts = parts_of(segments, unit)
        num_samples = parts_of(segments, "samples").sum()
        in_sample = parts.sum() / num_samples  # in the unit
        by_chance = [
            4 * in_sample * (share * (1 - share) * min(num_samples, LANES * window)) ** 0.5
            for share in own
        ]
        in_buffer = LANES * plan.recipes[0].packing.buffer_limit / segments[:, LENGTH].sum()
        for share, part, chance in zip(own, parts, by_chance, strict=True):
            kept = share * in_buffer * parts.sum()
            assert abs(part - share * parts.sum()) <= chance + kept


@pytest.mark.parametrize("order", [Order(), Order(pack_shuffle=0), Order(pack_shuffle=100)])
def test_a_stream_that_left_delivers_nothing_and_one_that_comes_comes_at_once(order):
    run = [Chapter(weights={name: 1}, steps=5) for name in ("web", "code", "web", "rare")]
    parts = delivered(plan_of(run, order=order), 4)
    assert [set(part[:, STREAM].tolist()) for part in parts] == [{0}, {1}, {0}, {2}]


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_stream_draws_what_was_not_delivered_before_anything_else(unit):
    """The order is that of the passes, and the pieces of a sample stay together."""
    recipe = plan_of([Chapter(weights={"web": 1, "code": 3}, steps=5)], unit=unit).recipes[0]
    samples = SampleOrder(recipe, 0, 0)
    samples.next()
    rows = [[0, 1, 7, 0, 5, 5], [1, 0, 3, 9, 2, 11], [0, 0, 8, 0, 4, 9], [0, 0, 8, 4, 5, 9]]
    again = np.array([*rows, [1, 0, 3, 4, 5, 11], [2, 0, 1, 0, 9, 9]])
    samples.give_back(samples.undelivered_of(again))
    assert samples.undelivered.segments[:, STREAM].tolist() == [0, 0, 0, 1, 1, 2]
    drawn = samples.next()
    again = drawn[drawn[:, PASS] == UNDELIVERED]
    assert [drawn[drawn[:, STREAM] == n, PASS].tolist()[:3].count(UNDELIVERED) for n in (0, 1)] == [
        2,
        1,
    ]
    for stream, expected in [(0, [rows[2], rows[3], rows[0]]), (1, [[1, 0, 3, 4, 5, 11], rows[1]])]:
        assert (
            samples.segments_of(again[again[:, STREAM] == stream], 64).segments.tolist() == expected
        )
    # A stream without a share keeps waiting.
    assert samples.undelivered.segments.tolist() == [[2, 0, 1, 0, 9, 9]]


@pytest.mark.parametrize("order", [Order(), Order(pack_shuffle=0)], ids=["default", "unshuffled"])
@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_a_ramp_is_followed_within_its_chapter(order, unit):
    run = [
        Chapter(weights={"web": Ramp(1, 0.5), "code": Ramp(0, 0.5)}, steps=40),
        Chapter(weights={"web": 0.5, "code": 0.5}, steps=20),
    ]
    packs = run_packs(plan_of(run, order=order, unit=unit), [8, 8], most=64)
    for first, stop, share in [(0, 20, 0.125), (20, 40, 0.375), (40, 60, 0.5)]:
        rows = [
            row
            for chapter, slot, own in packs
            for row in own
            if first <= slot // SIZE + 40 * chapter < stop
        ]
        segments = np.array(rows)
        parts = parts_of(segments, unit)
        # The packers of all lanes contain the tokens of two steps, which is how late the ramp is.
        assert abs(parts[1] / parts.sum() - share) < 0.06
