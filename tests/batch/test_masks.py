"""Masks compared with the rule for every pair of tokens, and attention through each of them."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from streampack.batch.layout import unpad
from streampack.batch.masks import (
    additive_mask,
    block_causal_mask,
    block_mask,
    dense_mask,
    document_mask_mod,
    fixed_cu_seqlens,
)
from tests.helpers.examples import examples
from tests.helpers.packs import native_batch

DOCUMENT_IDS = st.integers(1, 3).flatmap(
    lambda num_rows: st.integers(1, 8).flatmap(
        lambda num_tokens: st.lists(
            st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
)
PADDING = st.sampled_from(["identity", "causal"])


pytestmark = pytest.mark.usefixtures("one_thread")


def sees(document_ids: list[int], query: int, key: int, padding: str = "identity") -> bool:
    """A token sees itself and the earlier tokens of its segment; padding depends on the option."""
    if query == key:
        return True
    if key > query or document_ids[query] != document_ids[key]:
        return False
    return document_ids[query] != 0 or padding == "causal"


@given(document_ids=DOCUMENT_IDS, padding=PADDING)
def test_a_token_sees_itself_and_its_own_segment_before_it(document_ids, padding):
    mask = block_causal_mask(torch.tensor(document_ids, dtype=torch.int32), padding=padding)
    size = range(len(document_ids[0]))
    assert mask.dtype == torch.bool
    assert mask.shape == (len(document_ids), 1, len(size), len(size))
    expected = [
        [[sees(row, query, key, padding) for key in size] for query in size] for row in document_ids
    ]
    assert mask[:, 0].tolist() == expected


@given(document_ids=DOCUMENT_IDS, padding=PADDING)
def test_all_forms_are_the_same_mask(document_ids, padding):
    ids = torch.tensor(document_ids, dtype=torch.int32)
    expected = block_causal_mask(ids, padding=padding)
    places = (torch.arange(n) for n in (ids.shape[0], ids.shape[1], ids.shape[1]))
    batch, query, key = torch.meshgrid(*places, indexing="ij")
    by_function = document_mask_mod(ids, padding=padding)(
        batch, torch.zeros_like(batch), query, key
    )
    added = additive_mask(ids, dtype=torch.bfloat16, padding=padding)
    assert torch.equal(by_function, expected[:, 0])
    assert torch.equal(dense_mask(ids, padding=padding), expected[:, 0])
    assert added.dtype == torch.bfloat16
    assert torch.equal(added == 0, expected)
    assert (added[~expected] == torch.finfo(torch.bfloat16).min).all()


@examples(15)
@given(document_ids=DOCUMENT_IDS, padding=PADDING)
def test_a_block_mask_shows_the_blocks_that_hold_a_pair(document_ids, padding):
    ids = torch.tensor(document_ids, dtype=torch.int32).repeat_interleave(64, dim=1)
    made = block_mask(ids, padding=padding).to_dense()[:, 0]  # (B, blocks, blocks)
    mask = torch.nn.functional.pad(dense_mask(ids, padding=padding), 2 * (0, -ids.shape[1] % 128))
    blocks = mask.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).any(4).any(2)
    assert torch.equal(made.bool(), blocks)


# Attention through every form.


def random_rows(seed: int) -> list[list[int]]:
    """Three packs of 40 tokens at random: some full, some with padding."""
    generator = np.random.Generator(np.random.Philox(seed))
    rows = []
    for _ in range(3):
        cuts = np.sort(generator.choice(np.arange(1, 40), generator.integers(0, 8), replace=False))
        rows.append(np.diff(np.concatenate([[0], cuts])).tolist())
        if generator.random() < 0.5:
            rows[-1].append(40 - sum(rows[-1]))
    return [[length for length in row if length] for row in rows]


def heads_of(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, each of shape (B, 2 heads, S, 16)."""
    generator = torch.Generator().manual_seed(2)
    size = (3, len(batch["tokens"]), 2, batch["tokens"].shape[1], 16)
    query, key, value = torch.randn(size, generator=generator)
    return query, key, value


def one_by_one(batch: dict[str, Any], cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Causal attention within each pair of edges, in one line; shape (2, B * S, 16)."""
    line = [heads.transpose(0, 1).flatten(1, 2) for heads in heads_of(batch)]  # (2, B * S, 16)
    out = torch.zeros_like(line[0])
    for begin, end in pairwise(cu_seqlens.tolist()):
        query, key, value = (heads[:, begin:end][None] for heads in line)
        if end > begin:
            out[:, begin:end] = scaled_dot_product_attention(query, key, value, is_causal=True)[0]
    return out


KINDS = {
    "random": random_rows(0),
    "random-too": random_rows(1),
    "full": [[10, 13, 17], [1, 39], [20, 20]],
    "one-sample": [[40], [17], [1]],
    "all-padding": [[], []],
    "of-every-kind": [[40], [3, 2], [], [1] * 40],
}


@pytest.mark.thorough
@pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)
def test_all_ways_of_attention_agree(rows):
    batch = native_batch(rows, 40)
    query, key, value = heads_of(batch)
    ids = batch["document_ids"]
    expected = one_by_one(batch, batch["cu_seqlens"]).unflatten(1, (len(rows), 40)).transpose(0, 1)

    ways = {
        "bool": scaled_dot_product_attention(
            query, key, value, attn_mask=block_causal_mask(ids, padding="causal")
        ),
        "float": scaled_dot_product_attention(
            query, key, value, attn_mask=additive_mask(ids, padding="causal")
        ),
        "flex": flex_eager(query, key, value, ids, "causal"),
        "identity": scaled_dot_product_attention(
            query, key, value, attn_mask=block_causal_mask(ids)
        ),
        "flex-identity": flex_eager(query, key, value, ids, "identity"),
    }

    real = (ids > 0)[:, None, :, None]
    for name, out in ways.items():
        assert not out.isnan().any(), name
        where = real if "identity" in name else torch.ones_like(real)
        assert float(((out - expected) * where).abs().max()) <= 1e-5, name
    # A padding token that only sees itself has its own value as output.
    assert torch.equal(ways["identity"] * ~real, value * ~real)


def flex_eager(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: torch.Tensor, padding: Any
) -> torch.Tensor:
    """FlexAttention's forward pass; on a CPU it has no backward pass."""
    mask = block_mask(ids, padding=padding)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out: torch.Tensor = flex_attention(query, key, value, block_mask=mask)
    return out


# cu_seqlens of constant shape, and without padding.


def test_fixed_cu_seqlens_keep_their_shape_over_an_epoch_and_their_attention():
    shapes = set()
    for seed in range(20):
        batch = native_batch(random_rows(seed), 40)
        fixed = fixed_cu_seqlens(batch["cu_seqlens"], 32)
        shapes.add((fixed.shape, fixed.dtype))
        assert torch.equal(one_by_one(batch, fixed), one_by_one(batch, batch["cu_seqlens"]))
    assert shapes == {((33,), torch.int32)}


@pytest.mark.parametrize("multiple", [1, 4])
def test_unpadded_attention_is_that_of_the_pack_and_finds_its_way_back(multiple):
    batch = native_batch([[7, 12, 5], [9, 1], [], [24]], 40, multiple=multiple)
    bare = unpad(batch)
    assert len(bare["tokens"]) == 7 + 12 + 5 + 9 + 1 + 24
    assert bare["cu_seqlens"].tolist() == [0, 7, 19, 24, 33, 34, 58]
    assert bare["cu_seqlens"].dtype == torch.int32
    assert bare["max_seqlen"] == 24
    for key in ("tokens", "labels", "input_pos"):
        assert torch.equal(bare[key], batch[key].flatten()[bare["indices"]])

    line = [heads.transpose(0, 1).flatten(1, 2)[:, bare["indices"]] for heads in heads_of(batch)]
    found = torch.zeros(2, 4 * 40, 16)
    for begin, end in pairwise(bare["cu_seqlens"].tolist()):
        query, key, value = (heads[:, begin:end][None] for heads in line)
        out = scaled_dot_product_attention(query, key, value, is_causal=True)[0]
        found = found.index_copy(1, bare["indices"][begin:end], out)
    expected = one_by_one(batch, batch["cu_seqlens"])
    assert float((found - expected)[:, bare["indices"]].abs().max()) <= 1e-5
