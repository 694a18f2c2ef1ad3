"""Masks, against the rule written out for every pair of tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack.assemble import block_causal_mask, document_mask_mod

DOCUMENT_IDS = st.integers(1, 3).flatmap(
    lambda num_rows: st.integers(1, 8).flatmap(
        lambda num_tokens: st.lists(
            st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
)


def sees(document_ids: list[int], query: int, key: int) -> bool:
    """A token sees itself, and what came before it in its own segment; padding only itself."""
    if query == key:
        return True
    return key < query and document_ids[query] == document_ids[key] != 0


@given(document_ids=DOCUMENT_IDS)
def test_a_token_sees_itself_and_its_own_segment_before_it(document_ids: list[list[int]]) -> None:
    mask = block_causal_mask(torch.tensor(document_ids, dtype=torch.int32))
    size = range(len(document_ids[0]))
    assert mask.dtype == torch.bool
    assert mask.shape == (len(document_ids), 1, len(size), len(size))
    expected = [[[sees(row, query, key) for key in size] for query in size] for row in document_ids]
    assert mask[:, 0].tolist() == expected


@given(document_ids=DOCUMENT_IDS)
def test_the_function_for_flex_attention_is_the_same_mask(document_ids: list[list[int]]) -> None:
    ids = torch.tensor(document_ids, dtype=torch.int32)
    mask_mod = document_mask_mod(ids)
    batch, query, key = torch.meshgrid(
        torch.arange(ids.shape[0]),
        torch.arange(ids.shape[1]),
        torch.arange(ids.shape[1]),
        indexing="ij",
    )
    made = mask_mod(batch, torch.zeros_like(batch), query, key)
    assert torch.equal(made, block_causal_mask(ids)[:, 0])


def test_no_row_of_a_mask_is_empty_so_that_attention_of_padding_is_no_nan() -> None:
    mask = block_causal_mask(torch.tensor([[0, 0, 0], [1, 0, 0]]))
    heads = torch.ones(2, 1, 3, 4)
    out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    assert not out.isnan().any()


def test_making_a_mask_leaves_the_document_ids_alone() -> None:
    document_ids = torch.tensor([[1, 1, 2, 0]])
    block_causal_mask(document_ids)
    assert document_ids.tolist() == [[1, 1, 2, 0]]
