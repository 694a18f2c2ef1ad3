"""Our strict PackedDataset against torchtune's own, if that is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streampack.compat.torchtune import PackedDataset, padded_collate_packed

datasets = pytest.importorskip(
    "torchtune.datasets",
    reason="torchtune is not installed, or cannot be imported with this torchao",
    exc_type=ImportError,
)
collate = pytest.importorskip("torchtune.data", exc_type=ImportError)


@pytest.mark.parametrize("seed", range(300))
def test_items_and_masks_are_torchtunes_own(seed):
    rng = np.random.default_rng(seed)
    split = bool(rng.integers(2))
    max_seq_len = int(rng.integers(1, 12))
    lengths = rng.integers(0, 30 if split else max_seq_len + 1, rng.integers(0, 15))
    samples = [
        {name: rng.integers(0, 99, length).tolist() for name in ("tokens", "labels")}
        for length in lengths
    ]
    options = {
        "max_seq_len": max_seq_len,
        "padding_idx": 3,
        "max_packs": None if rng.integers(2) else int(rng.integers(0, 6)),
        "split_across_pack": split,
    }

    theirs, ours = datasets.PackedDataset(samples, **options), PackedDataset(samples, **options)

    assert len(ours) == len(theirs)
    for number in range(len(theirs)):
        for name, value in theirs[number].items():
            assert torch.equal(ours[number][name], value)
            assert ours[number][name].dtype == value.dtype
    if len(theirs):
        packs = [theirs[number] for number in range(len(theirs))]
        mask = collate.padded_collate_packed(packs)["mask"]
        if isinstance(mask, torch.Tensor):  # a BlockMask, where FlexAttention is used
            assert torch.equal(padded_collate_packed(ours[:])["mask"], mask)
