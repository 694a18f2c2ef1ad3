"""Formats, weights and views of context-parallel slices: what they accept and what they refuse."""

from __future__ import annotations

import pytest
import torch

from streampack import ConfigError, Packing, loss_weights, merge_slices
from streampack.batch.slices import context_slice, slice_batch
from streampack.formats import (
    count_units,
    to_megatron,
    to_torchtitan,
    to_torchtitan_flat,
)
from streampack.gather.context_slice import ContextSlice
from tests.helpers import conformance
from tests.helpers.packs import native_batch
from tests.helpers.slices import LAYOUTS, PER_TOKEN, context_worlds

PACKING = Packing(max_seq_len=16, pad_to_multiple=4)
WORLD = context_worlds(2)[0]


@pytest.fixture
def slices():
    batch = native_batch([[8, 4], [16]], 16)
    return [slice_batch(batch, ContextSlice(rank=rank, num_ranks=2)) for rank in range(2)]


@pytest.mark.parametrize(
    ("lengths", "size", "num_ranks"),
    [([[12]], 12, 2), ([[6], [6]], 6, 3)],  # segments, of six columns, are as large as tokens
)
def test_what_slices_have_in_common_is_not_cut_or_merged_where_it_has_the_shape_of_tokens(
    lengths, size, num_ranks
):
    batch = native_batch(lengths, size)
    cuts = [
        slice_batch(batch, ContextSlice(rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    assert all(torch.equal(own["segments"], batch["segments"]) for own in cuts)
    merged = merge_slices(cuts)
    assert list(merged) == list(batch)
    assert all(
        torch.equal(torch.as_tensor(merged[key]), torch.as_tensor(batch[key]))
        for key in batch
        if not isinstance(batch[key], str)
    )


def test_slices_that_are_read_are_those_that_are_cut_from_whole_rows(tmp_path):
    written = conformance.write_streams(tmp_path, [[5, 9, 3, 12, 16, 1, 7, 20, 4]])
    whole = list(conformance.make(written, max_seq_len=16))
    for rank, world in enumerate(context_worlds(2)):
        own = ContextSlice(rank=rank, num_ranks=2)
        for batch, read in zip(
            whole, conformance.make(written, max_seq_len=16, world=world), strict=True
        ):
            cut = slice_batch(batch, own)
            assert all(torch.equal(read[key], cut[key]) for key in PER_TOKEN)


def test_torchtitans_one_row_is_cut_as_one():
    for convert, frame_tokens in ((to_torchtitan_flat, 48), (to_torchtitan, None)):
        context = context_slice(WORLD, PACKING, convert, 3 * PACKING.row_tokens)
        assert context is not None
        assert context.frame_tokens == frame_tokens


def test_megatrons_edges_are_those_of_whole_rows(slices):
    whole = to_megatron(merge_slices(slices))
    for own in map(to_megatron, slices):
        assert own["tokens"].shape == own["loss_mask"].shape == (2, 8)
        assert torch.equal(own["cu_seqlens"], whole["cu_seqlens"])
        assert own["cu_seqlens"].shape == (2, 17)
        assert torch.equal(own["max_seqlen"], whole["max_seqlen"])


def test_weights_of_tokens_take_slices_and_others_do_not(slices):
    assert sum(count_units(own) for own in slices) == count_units(merge_slices(slices))
    assert loss_weights(slices[0], units=10).shape == (2, 8)
    for average in ("samples", "packs"):
        with pytest.raises(ConfigError, match=f"average='{average}'.*merge_slices"):
            loss_weights(slices[0], average=average)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields_of_ones_own_are_merged(layout):
    batch = native_batch([[8, 4], [16]], 16) | {"loss": torch.rand(2, 16, 3), "name": ["a", "b"]}
    cut = [
        slice_batch(batch, ContextSlice(rank=rank, num_ranks=2, layout=layout)) for rank in range(2)
    ]
    merged = merge_slices(cut)
    assert torch.equal(merged["loss"], batch["loss"])
    assert merged["name"] == ["a", "b"]
    assert "chunks" not in merged
