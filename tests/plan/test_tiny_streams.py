"""Tiny streams and tiny shuffle blocks keep their order and are planned in few calls."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from streampack import rng
from streampack.config import Mixing, Order, Packing
from streampack.order import shuffle
from streampack.pack import best_fit_decreasing
from streampack.plan import sample_order
from streampack.plan.recipe import Recipe
from tests.helpers.planning import device_batches, recipe, world_views


def make(size: int, unit: str, num_lanes: int = 1, **kwargs) -> Recipe:
    """A stream of 3,000 samples, and one of `size` that is a hundredth of the mixture."""
    rng = np.random.default_rng(size)
    lengths = [rng.integers(20, 400, 3000)] + [rng.integers(20, 400, size)] * bool(size)
    return recipe(
        lengths,
        weights=[{"proportion": 0.99}, {"proportion": 0.01}][: len(lengths)],
        mixing=Mixing(weight_unit=unit, batching_method=kwargs.pop("method", "random")),
        packing=Packing(max_seq_len=512, buffer_tokens=4096),
        order=Order(**{"seed": 5, "pack_shuffle": 0, **kwargs}),
        num_lanes=num_lanes,
        global_batch_size=4 * num_lanes,
    )


def num_calls(r: Recipe, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of kernel calls, random draws and packed windows to plan an epoch."""
    calls = 0

    def counted(module, name: str) -> None:
        function = getattr(module, name)

        def call(*args):
            nonlocal calls
            calls += 1
            return function(*args)

        monkeypatch.setattr(module, name, call)

    for module, name in (
        (shuffle, "permutation"),
        (shuffle, "shuffle_rows"),
        (shuffle, "shuffle_blocks"),
        (shuffle, "random_keys"),
        (rng, "random_bits"),
        (sample_order, "draw_known"),
        (best_fit_decreasing, "place_segments"),
    ):
        counted(module, name)
    device_batches(r, world_views(1, r.global_batch_size)[0])
    monkeypatch.undo()
    return calls


@pytest.mark.thorough
@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("num_lanes", [1, 30])
def test_tiny_streams_and_blocks_are_planned_in_few_calls(unit, num_lanes, monkeypatch):
    """One call per pass or block would mean hundreds per lane."""
    plain = num_calls(make(0, unit, num_lanes), monkeypatch)
    for size in (1, 3, 20, 50):
        assert num_calls(make(size, unit, num_lanes), monkeypatch) <= 3 * plain + 8 * num_lanes
    for block, pack_shuffle in product((1, 2, 3), (0, None)):
        r = make(0, unit, num_lanes, shuffle_block_size=block, pack_shuffle=pack_shuffle)
        assert num_calls(r, monkeypatch) <= 3 * plain + 8 * num_lanes
