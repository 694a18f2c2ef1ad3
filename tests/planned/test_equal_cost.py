"""Packs of equal cost, from shards to batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from streampack import PackCost, PackedDataLoader, Packing
from streampack.formats import to_hf_flash, to_megatron, to_torchtitan_flat
from streampack.runtime.resumable import engine_of
from streampack.types import LENGTH
from tests.helpers import conformance
from tests.helpers.conformance import all_rows
from tests.helpers.examples import crossed
from tests.helpers.lengths import synthetic_lengths
from tests.helpers.planning import global_batches, recipe

SIZE = 256
COST = {"cost": PackCost(400, hidden_size=50)}
METHODS = ("random", "stratified", "per_stream", "device_per_stream")


def as_it_is(batch: dict[str, Any]) -> dict[str, Any]:
    """A user's format for varlen attention."""
    return batch


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = [
        np.clip(rng.lognormal(3.5, 1, 900), 1, 700).astype(int).tolist(),
        rng.integers(1, 40, 500).tolist(),
    ]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def make(written, method: str = "random", packing: dict[str, Any] | None = None, **options: Any):
    mixing = {"batching_method": method, "global_batch_size": 24, **options.pop("mixing", {})}
    options = {"batch_format": as_it_is, "order": {"num_lanes": 2}, **options}
    return conformance.make(
        written, max_seq_len=SIZE, packing=COST | (packing or {}), mixing=mixing, **options
    )


@pytest.mark.parametrize(
    ("convert", "num_workers"), crossed([to_hf_flash, to_megatron, to_torchtitan_flat], [0, 1])
)
def test_a_flat_row_has_a_few_sizes_below_that_of_all_slots(written, convert, num_workers):
    batch_format = functools.partial(convert, pad_to=SIZE // 8)
    loader = PackedDataLoader(make(written, batch_format=batch_format), num_workers=num_workers)
    slots = [
        (batch[1] if isinstance(batch, tuple) else batch["labels"]).numel() for batch in loader
    ]
    used = [int(batch["segments"][:, 5].sum()) for batch in make(written)]
    assert slots == [-(-max(tokens, 1) // 32) * 32 for tokens in used]
    assert len(slots) > 30 > 3 * len(set(slots))
    assert sum(slots) < 0.9 * 2 * 384 * len(slots)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_that_carries_has_the_packs_that_its_tokens_fill(written, method):
    dataset = make(written, method, mixing={"epoch_end": "carry", "global_batch_size": 4})
    in_epoch = engine_of(dataset).recipe.packs_per_carry_epoch
    all_packs = len(all_rows([make(written, method, mixing={"global_batch_size": 4})]))

    assert abs(in_epoch - all_packs) <= 4 + 0.06 * all_packs
    tokens = [
        sum(conformance.segments_of([row])[:, 4].sum() for row in all_rows([dataset]))
        for _ in range(4)
    ]
    assert abs(np.mean(tokens) / sum(map(sum, written.lengths)) - 1) < 0.08


@pytest.mark.thorough
def test_the_tokens_of_global_batches_vary_by_less_than_one_percent():
    lengths = np.minimum(synthetic_lengths("web", 200_000), 8192)
    packing = Packing(max_seq_len=8192, cost=PackCost(9558))
    r = recipe([lengths], packing=packing, global_batch_size=512)

    tokens = [
        sum(row[LENGTH] for pack in packs for row in pack)
        for packs, _ in global_batches(r)
        if len(packs) == 512
    ]

    assert len(tokens) > 20
    assert np.std(tokens) < 0.01 * np.mean(tokens)
