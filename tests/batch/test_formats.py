"""Every format, checked key by key against a table, and traced back to document boundaries."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack import formats
from streampack.batch.layout import real_tokens
from tests.helpers.packs import ROWS_OF_4, native_batch, samples_of

pytestmark = pytest.mark.usefixtures("one_thread")


B, S, T = 4, 24, 96
I64, I32, F32, BOOL = torch.int64, torch.int32, torch.float32, torch.bool
STATE = {"epoch": int, "position": int}

# The keys that each trainer's documentation and source require, with the types and the shapes of
# tensors. The batch is ROWS_OF_4: 6 segments in 4 rows, 2 of which have padding.
TABLE: dict[str, Any] = {
    "native": {
        "tokens": (I64, (B, S)),
        "labels": (I64, (B, S)),
        "input_pos": (I64, (B, S)),
        "document_ids": (I32, (B, S)),
        "cu_seqlens": (I32, (9,)),
        "max_seqlen": int,
        "segments": (I64, (6, 6)),
        **STATE,
    },
    "compact": {
        "tokens": (I32, (B, S)),
        "next_tokens": (I64, (6,)),
        "cu_seqlens": (I32, (9,)),
        "max_seqlen": int,
        "segments": (I64, (6, 6)),
        "positions": str,
        **STATE,
    },
    "hf": {
        "input_ids": (I64, (B, S)),
        "labels": (I64, (B, S)),
        "position_ids": (I64, (B, S)),
        "use_cache": bool,
        **STATE,
    },
    "hf_flash": {
        "input_ids": (I64, (1, T)),
        "labels": (I64, (1, T)),
        "position_ids": (I64, (1, T)),
        "cu_seq_lens_q": (I32, (9,)),
        "cu_seq_lens_k": (I32, (9,)),
        "max_length_q": int,
        "max_length_k": int,
        "use_cache": bool,
        **STATE,
    },
    "torchtune": {
        "tokens": (I64, (B, S)),
        "labels": (I64, (B, S)),
        "input_pos": (I64, (B, S)),
        "mask": (BOOL, (B, S, S)),
    },
    "torchtitan": ({"input": (I64, (B, S)), "positions": (I64, (B, S))}, (I64, (B, S))),
    "torchtitan_flat": ({"input": (I64, (T,)), "positions": (I64, (T,))}, (I64, (T,))),
    "megatron": {
        "tokens": (I64, (B, S)),
        "labels": (I64, (B, S)),
        "position_ids": (I64, (B, S)),
        "loss_mask": (F32, (B, S)),
        "cu_seqlens": (I32, (B, S + 1)),
        "max_seqlen": (I32, (B,)),
        **STATE,
    },
    "olmo_core": {
        "input_ids": (I64, (B, S)),
        "label_mask": (BOOL, (B, S)),
        "doc_lens": (I32, (B, 3)),
        "max_doc_lens": list,
    },
    "llm_foundry": {
        "input_ids": (I64, (B, S)),
        "attention_mask": (I64, (B, S)),
        "labels": (I64, (B, S)),
        "sequence_id": (I64, (B, S)),
        **STATE,
    },
    "llama_factory": {
        "input_ids": (I64, (B, S)),
        "labels": (I64, (B, S)),
        "position_ids": (I64, (B, S)),
        "attention_mask": (F32, (B, 1, S, S)),  # the numbered one is for B = 1
        **STATE,
    },
}
SHIFTED = {"native", "torchtitan", "torchtitan_flat", "megatron"}
UNSHIFTED = {"hf", "hf_flash", "torchtune", "llm_foundry", "llama_factory"}  # olmo_core: a mask


def shown(value: Any) -> Any:
    """The types and shapes of a format's output."""
    if torch.is_tensor(value):
        return value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    return tuple(map(shown, value)) if isinstance(value, tuple) else type(value)


def the_batch(**kinds: Any) -> dict[str, Any]:
    return native_batch(ROWS_OF_4, S, **kinds)


def get_format(name: str) -> Any:
    """The format, with any option that it needs for several packs."""
    made = formats.get_format(name)
    return partial(made, dense=True) if name == "llama_factory" else made


@pytest.mark.parametrize("name", TABLE)
def test_a_format_has_the_keys_types_and_shapes_of_its_trainer(name):
    assert shown(get_format(name)(the_batch())) == TABLE[name]


def test_every_format_has_a_row_in_the_table():
    assert set(TABLE) == set(formats.FORMATS)


def inputs_labels(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and labels of a format, B x S, whatever the format calls them."""
    inputs, labels = made if isinstance(made, tuple) else (made, made["labels"])
    [key] = {"tokens", "input_ids", "input"} & set(inputs)
    return inputs[key].view(B, S), labels.view(B, S)


@pytest.mark.parametrize("name", sorted(SHIFTED | UNSHIFTED))
def test_labels_name_the_samples_own_next_token_in_the_convention_that_is_promised(name):
    batch = the_batch()
    tokens, labels = inputs_labels(get_format(name)(batch))
    assert torch.equal(tokens, batch["tokens"])
    expected = torch.full((B, S), -100)
    for row, first, length in samples_of(batch):
        for at in range(first, first + length - 1):
            expected[row, at if name in SHIFTED else at + 1] = batch["tokens"][row, at + 1]
    assert torch.equal(labels, expected)


def test_a_format_leaves_the_native_batch_alone():
    for name in formats.FORMATS:
        batch, before = the_batch(), the_batch()
        get_format(name)(batch)
        for key, value in before.items():
            same = torch.equal(value, batch[key]) if torch.is_tensor(value) else value == batch[key]
            assert same, (name, key)


# Document boundaries, recovered from each format's own representation of them.


def starts_of(name: str, made: Any) -> list[int]:
    """The beginnings of documents in the line of B * S tokens, as the trainer would find them."""
    if name in ("hf", "torchtitan", "torchtitan_flat"):
        inputs = made if name == "hf" else made[0]
        positions = inputs["position_ids" if name == "hf" else "positions"].flatten()
        return (positions == 0).nonzero().flatten().tolist()
    if name in ("native", "compact", "hf_flash"):
        found: list[int] = made["cu_seq_lens_q" if name == "hf_flash" else "cu_seqlens"].tolist()
        return found[:-1]
    if name == "megatron":
        rows = [sorted({edge for edge in row if edge < S}) for row in made["cu_seqlens"].tolist()]
    elif name == "olmo_core":
        rows = []
        for lengths in made["doc_lens"].tolist():
            assert sum(lengths) == S
            ends = [sum(lengths[:k]) for k in range(len(lengths)) if lengths[k]]
            rows.append(ends)
    elif name in ("torchtune", "llama_factory"):
        seen = made["mask"] if name == "torchtune" else made["attention_mask"][:, 0] == 0
        first = (~seen).tril().sum(2) == torch.arange(S)  # sees itself alone
        rows = [row.nonzero().flatten().tolist() for row in first]
    else:
        ids = made["sequence_id"]
        rows = [[0, *((row.diff() != 0).nonzero().flatten() + 1).tolist()] for row in ids]
    return [number * S + start for number, row in enumerate(rows) for start in row]


@st.composite
def lengths_of_rows(draw: st.DrawFn) -> list[list[int]]:
    rows = []
    for _ in range(B):
        lengths, room = [], S
        while room and draw(st.integers(0, 4)):
            lengths.append(draw(st.integers(1, room)))
            room -= lengths[-1]
        rows.append(lengths)
    return rows


@pytest.mark.parametrize("name", TABLE)
@given(rows=lengths_of_rows())
def test_documents_are_found_again_where_they_were(name, rows):
    batch = native_batch(rows, S)
    found = starts_of(name, get_format(name)(batch))
    expected = batch["cu_seqlens"].tolist()[:-1]
    if name in ("torchtune", "llama_factory"):  # these treat each padding token as a document
        padding = (batch["document_ids"].flatten() == 0).nonzero().flatten().tolist()
        expected = sorted({*expected, *padding})
    assert found == expected


# One by one.


@pytest.mark.parametrize("convert", [formats.to_hf, formats.to_llama_factory])
def test_a_dense_mask_is_additive_finite_and_of_the_models_type(convert):
    mask = convert(the_batch(), dense=True, dtype=torch.bfloat16)["attention_mask"]
    assert (mask.dtype, tuple(mask.shape)) == (torch.bfloat16, (B, 1, S, S))
    assert mask.isfinite().all()
    assert torch.equal(mask == 0, formats.block_causal_mask(the_batch()["document_ids"]))


@pytest.mark.processes
def test_hf_flash_without_padding_is_what_transformers_own_collator_makes():
    transformers = pytest.importorskip("transformers")
    batch = the_batch()
    samples = [
        {"input_ids": batch["tokens"][row, first : first + length].tolist()}
        for row, first, length in samples_of(batch)
    ]
    collate = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_tensors="pt"
    )
    expected = collate(samples)
    made = formats.to_hf_flash(batch, pad_to=1)
    assert set(made) - set(expected) == {"use_cache", "epoch", "position"}
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert made[key].dtype == value.dtype, key
            assert torch.equal(made[key], value), key
        else:
            assert made[key] == value, key


FLAT = {
    "hf_flash": lambda made: (made["input_ids"], made["labels"], made["position_ids"]),
    "torchtitan_flat": lambda made: (made[0]["input"], made[1], made[0]["positions"]),
    "megatron": lambda made: (made["tokens"], made["labels"], made["position_ids"]),
}


@pytest.mark.parametrize("name", FLAT)
@given(rows=lengths_of_rows(), pad_to=st.sampled_from([1, 5, 8, 96]), own=st.sampled_from([1, 4]))
def test_pad_to_leaves_the_samples_and_padding_up_to_the_multiple(name, rows, pad_to, own):
    width = S if own == 1 else 4 * S
    batch = native_batch(rows, width, multiple=own, cuts=[(0, 0)])
    total, samples = 4 * width, formats.unpad(batch)
    used = len(samples["tokens"])
    size = min(-(-max(used, 1) // pad_to) * pad_to, total)
    made = partial(formats.get_format(name), pad_to=pad_to)(batch)

    tokens, labels, positions = (value.flatten() for value in FLAT[name](made))
    assert len(tokens) == len(labels) == len(positions) == size
    assert tokens[:used].tolist() == samples["tokens"].tolist()
    assert positions[:used].tolist() == samples["input_pos"].tolist()
    starts = samples["cu_seqlens"].tolist()
    expected = samples["labels"].tolist()
    if name == "hf_flash":  # unshifted, so the target after the cut is lost
        expected = [t for a, b in pairwise(starts) for t in [-100, *expected[a : b - 1]]]
    assert labels.tolist() == expected + [-100] * (size - used)
    assert positions[used:].tolist() == list(range(size - used))
    edges = [*starts, size] if used < size else starts
    if name == "hf_flash":
        assert made["cu_seq_lens_q"].tolist() == edges
        assert made["max_length_q"] == max(b - a for a, b in pairwise(edges))
    elif name == "megatron":
        assert made["cu_seqlens"].tolist() == [edges + [size] * (size + 1 - len(edges))]


def test_hf_flash_with_a_capacity_has_constant_shapes():
    shapes = set()
    for rows in (ROWS_OF_4, [[1] * 24, [2, 3], [], [4]], [[], [], [], []]):
        made = formats.to_hf_flash(native_batch(rows, S), capacity=32)
        shapes.add(str(shown(made)))
        assert made["cu_seq_lens_q"][-1] == T
    assert len(shapes) == 1


def test_megatron_fills_cu_seqlens_with_s_and_masks_what_is_no_target():
    batch = the_batch()
    made = formats.to_megatron(batch)
    assert made["cu_seqlens"][0].tolist() == [0, 7, 19] + [24] * 22
    assert made["cu_seqlens"][1].tolist() == [0, 9, 10] + [24] * 22
    assert made["cu_seqlens"][3].tolist() == [0] + [24] * 24
    assert made["max_seqlen"].tolist() == [12, 14, 24, 24]
    assert torch.equal(made["loss_mask"] == 1, batch["labels"] != -100)
    assert torch.equal(made["loss_mask"] == 0, batch["labels"] == -100)


@pytest.mark.parametrize("multiple", [1, 4])
def test_olmo_cores_own_labels_from_the_mask_are_ours_but_for_cuts(multiple):
    batch = native_batch([[7, 9], [5], [23], []], 24, multiple=multiple, cuts=[(0, 0), (2, 0)])
    made = formats.to_olmo_core(batch)
    # OLMo-core makes labels by masking and then shifting.
    labels = made["input_ids"].masked_fill(~made["label_mask"], -100)
    labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = batch["labels"].clone()
    expected[0, 6] = expected[2, 22] = -100
    assert torch.equal(labels, expected)
    assert made["max_doc_lens"] == [row.max().item() for row in made["doc_lens"]]


@pytest.mark.processes
def test_llm_foundry_and_llama_factory_number_documents_from_0_and_from_1():
    foundry = formats.to_llm_foundry(the_batch())
    factory = formats.to_llama_factory(native_batch([[9, 1]], S))
    assert foundry["sequence_id"][1].tolist() == [0] * 9 + [1] + [-1] * 14
    assert foundry["attention_mask"][1].tolist() == [1] * 10 + [0] * 14
    # Without a zero, transformers would treat the others as a single document.
    assert factory["attention_mask"].tolist() == [[1] * 9 + [2]]


@pytest.mark.parametrize("multiple", [1, 4])
def test_llama_factory_leaves_out_what_its_collator_leaves_out(multiple):
    # With flash attention, it selects the tokens with a nonzero number and uses no other mask.
    batch = native_batch([[9, 1]], S, multiple=multiple)
    batch |= {"weight": torch.rand(1, S), "images": ["a"]}
    made = formats.to_llama_factory(batch)
    kept = batch["document_ids"][0] > 0
    whole = formats.to_hf(batch)
    for key in ("input_ids", "labels", "position_ids", "weight"):
        assert torch.equal(made[key], whole[key][:, kept]), key
    assert torch.equal(made["attention_mask"], batch["document_ids"][:, kept])
    assert made["images"] == ["a"]


def test_torchtune_takes_a_block_mask_other_padding_and_shifted_labels():
    batch = the_batch()
    causal = formats.to_torchtune(batch, padding="causal", shifted=True)
    assert torch.equal(causal["mask"][3], torch.ones(S, S, dtype=torch.bool).tril())
    assert causal["labels"] is batch["labels"]
    assert formats.to_torchtune(batch, mask="block")["mask"].shape == (B, 1, S, S)


@given(rows=lengths_of_rows())
def test_real_tokens_are_those_of_the_segments_not_their_padding(rows):
    batch = native_batch([[n for n in row if n % 3] for row in rows], 48, multiple=3)
    expected = torch.zeros(B, 48, dtype=torch.bool)
    for row, first, length in samples_of(batch):
        expected[row, first : first + length] = True
    assert torch.equal(real_tokens(batch), expected)
    assert all(b > a for a, b in pairwise(batch["cu_seqlens"].tolist()))
