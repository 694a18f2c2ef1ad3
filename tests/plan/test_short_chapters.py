"""Short chapters of `random` by tokens deliver the shares asked for, however many lanes."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.chapters import Chapter
from streampack.config import Mixing, Order, Packing
from streampack.plan.device_plan import DeviceView
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.runtime.stats import COUNTED, TOKENS, count_segments
from tests.helpers.chapters import run_plan
from tests.helpers.examples import crossed
from tests.helpers.planning import recipe


def lengths_of(median: float, spread: float, num: int) -> np.ndarray:
    rng = np.random.default_rng(num)
    return np.minimum(rng.lognormal(np.log(median), spread, num) + 1, 30 * median).astype(np.int64)


# As web pages, programs and books have them, with packs of 512 tokens.
LENGTHS = {
    "web": lengths_of(25, 1.2, 200_000),
    "code": lengths_of(110, 1.5, 30_000),
    "books": lengths_of(5_000, 0.8, 12_000),
}
PACKS_OF_LANE = 8  # in a global batch
PACKING = Packing(max_seq_len=512, buffer_tokens=8 * 512)


def shares_of(weights: dict, num_lanes: int, steps: list[int], seed: int, window: int):
    """The share of the tokens of each stream over chapters of so many steps, in packs of 512."""
    plan = run_plan(
        {name: LENGTHS[name] for name in weights},
        [Chapter(weights=weights, steps=num) for num in steps],
        method="random",
        unit="tokens",
        packing=PACKING,
        order=Order(seed=seed, pack_shuffle=window),
        num_lanes=num_lanes,
        lane_turn=PACKS_OF_LANE,
        global_batch_size=PACKS_OF_LANE * num_lanes,
    )
    return delivered(plan, DeviceView(batch_size=PACKS_OF_LANE * num_lanes))


def delivered(plan: RunPlan, view: DeviceView, most: int | None = None):
    """The share of each stream in the tokens of a run, or of the first batches of an epoch."""
    sequence = PackSequence(plan.seen([view] * len(plan)))
    counts = np.zeros((len(plan.recipes[0].streams), len(COUNTED)), np.int64)
    while most != 0 and (batches := sequence.next(64 if most is None else 1)) is not None:
        count_segments(batches.packs.segments, counts)
        most = None if most is None else most - 1
    sequence.close()
    return counts[:, TOKENS] / counts[:, TOKENS].sum()


def delivered_after(plan: RunPlan, view: DeviceView, steps: list[int]) -> list[np.ndarray]:
    """The share of each stream in the tokens of the first batches, for each number of them."""
    sequence = PackSequence(plan.seen([view]))
    counts = np.zeros((len(plan.recipes[0].streams), len(COUNTED)), np.int64)
    found = []
    for number in np.diff(steps, prepend=0).tolist():
        while number and (batches := sequence.next(min(number, 64))) is not None:
            count_segments(batches.packs.segments, counts)
            number -= batches.num_batches
        found.append(counts[:, TOKENS] / counts[:, TOKENS].sum())
    sequence.close()
    return found


MIXTURES = [
    {"web": 0.8, "books": 0.2},
    {"web": 0.2, "books": 0.8},
    {"web": 0.5, "code": 0.3, "books": 0.2},
]


WINDOWS = {"shuffled": 8192, "part of a chunk": 2048, "in order": 0}


def check(found: list[np.ndarray], weights: dict[str, float]) -> None:
    assert np.abs(np.mean(found, axis=0) / list(weights.values()) - 1).max() < 0.05


@pytest.mark.parametrize(
    ("weights", "window", "steps"),
    [
        (MIXTURES[0], "shuffled", [20]),
        (MIXTURES[1], "part of a chunk", [20]),
        (MIXTURES[1], "in order", [10] * 10),
        (MIXTURES[2], "in order", [100]),
        pytest.param(MIXTURES[0], "shuffled", [10] * 10, marks=pytest.mark.slow),
        pytest.param(MIXTURES[0], "in order", [20], marks=pytest.mark.slow),
        pytest.param(MIXTURES[2], "shuffled", [20], marks=pytest.mark.slow),
    ],
)
def test_chapters_deliver_their_shares_on_average(weights, window, steps):
    """In 20 steps, 160 packs of a lane, it gets two books. Ten chapters are as after amends."""
    seeds = range(400 // sum(steps))
    check([shares_of(weights, 8, steps, seed, WINDOWS[window]) for seed in seeds], weights)


@pytest.mark.parametrize("epoch_end", ["pad", "carry"])
def test_epochs_begin_with_their_shares_on_average(epoch_end):
    weights, found = MIXTURES[0], []
    for seed in range(10):
        r = recipe(
            [LENGTHS[name] for name in weights],
            weights=[{"proportion": share} for share in weights.values()],
            packing=PACKING,
            mixing=Mixing(weight_unit="tokens", epoch_end=epoch_end, epoch_size=10_000_000),
            order=Order(seed=seed, pack_shuffle=0),
            num_lanes=8,
            lane_turn=PACKS_OF_LANE,
            global_batch_size=64,
        )
        found.append(delivered(RunPlan([r]), DeviceView(batch_size=64), most=20))
    check(found, weights)


@pytest.mark.parametrize(("method", "steps"), crossed([None, "next_fit"], [1, 2]))
def test_a_window_with_a_long_sample_has_no_more_tokens_than_others(method, steps):
    """A step is half a window. A window has at most four books."""
    weights = {"web": 0.9, "books": 0.1}
    found = []
    for seed in range(5):
        plan = run_plan(
            {"web": np.full(600_000, 10), "books": np.full(3_000, 5_000)},
            [Chapter(weights=weights, steps=steps)],
            method="random",
            unit="tokens",
            packing=Packing(max_seq_len=500, method=method),
            order=Order(seed=seed, pack_shuffle=32 * 512),
            num_lanes=32,
            lane_turn=20,
            global_batch_size=32 * 20,
        )
        found.append(delivered(plan, DeviceView(batch_size=640)))
    check(found, weights)


LONG = {
    "web": lengths_of(400, 1.2, 2_000_000),
    "code": lengths_of(1_800, 1.5, 300_000),
    "books": lengths_of(81_000, 0.8, 40_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_lanes", [1, 8, 64])
@pytest.mark.parametrize(
    "weights",
    [
        {"web": 0.98, "books": 0.02},
        {"web": 0.02, "books": 0.98},
        {"web": 0.68, "code": 0.3, "books": 0.02},
    ],
)
def test_chapters_of_long_documents_deliver_small_shares_on_average(weights, num_lanes):
    """Over 200 seeds, after 20 and after 100 steps of 512 packs of 8,192 tokens."""
    found = []
    for seed in range(200):
        plan = run_plan(
            {name: LONG[name] for name in weights},
            [Chapter(weights=weights, steps=100)],
            method="random",
            unit="tokens",
            packing=Packing(max_seq_len=8192),
            order=Order(seed=seed),
            num_lanes=num_lanes,
            lane_turn=512 // num_lanes,
            global_batch_size=512,
            shard_size=5000,
        )
        found.append(delivered_after(plan, DeviceView(batch_size=512), [20, 100]))
    for shares in np.moveaxis(found, 1, 0):
        check(list(shares), weights)
