"""The native batch, compared with a batch filled token by token in plain Python."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streampack.batch import batch as batch_module
from streampack.batch.batch import make_batches, make_compacts
from streampack.gather.gather import Rows
from streampack.types import Packs
from tests.helpers import conformance
from tests.helpers.rows import planned_rows


def plain_batch(rows: Rows, packs: Packs, positions: str) -> dict[str, Any]:
    """Fill a batch one token at a time."""
    labels, input_pos, document_ids, cu_seqlens, numbered = [], [], [], [0], []
    for row, tokens in enumerate(rows.tokens.tolist()):
        segments = packs[row].tolist() if row < len(packs) else []
        at = 0
        for document, (stream, pass_, sample, start, length, _total) in enumerate(segments, 1):
            for i in range(length):
                follows = i + 1 < length
                next_token = int(rows.next_tokens[len(numbered)])
                labels.append(tokens[at + i + 1] if follows else next_token)
                input_pos.append(i + (start if positions == "continue" else 0))
                document_ids.append(document)
            numbered.append([row, stream, pass_, sample, start, length])
            at += length
            cu_seqlens.append(cu_seqlens[-1] + length)
        room = len(tokens) - at
        labels += [-100] * room
        input_pos += range(room)
        document_ids += [0] * room
        if room:
            cu_seqlens.append(cu_seqlens[-1] + room)
    return {
        "tokens": rows.tokens.tolist(),
        "labels": np.reshape(labels, rows.tokens.shape).tolist(),
        "input_pos": np.reshape(input_pos, rows.tokens.shape).tolist(),
        "document_ids": np.reshape(document_ids, rows.tokens.shape).tolist(),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max(b - a for a, b in pairwise(cu_seqlens)),
        "segments": numbered,
        "epoch": 3,
        "position": 40,
    }


@given(planned=planned_rows(), positions=st.sampled_from(["restart", "continue"]))
def test_a_batch_is_what_filling_it_token_by_token_gives(planned, positions):
    rows, packs = planned
    batch = make_batches(rows, packs, steps=[(3, 40)], positions=positions)[0]
    shown = {key: v.tolist() if torch.is_tensor(v) else v for key, v in batch.items()}
    assert shown == plain_batch(rows, packs, positions)


def rows_with_labels(*labels: list[int]) -> tuple[Rows, Packs]:
    """Two packs with one segment each, and a row of padding, with these labels."""
    segments = [[4, 0, 0, 0, 2, 2], [7, 0, 1, 0, 2, 9]]
    tokens, next_tokens = np.array([[5, 6], [7, 8], [0, 0]], np.int32), np.array([-100, 9])
    rows = Rows(tokens=tokens, next_tokens=next_tokens, labels=np.array(labels, np.int32))
    return rows, Packs(segments=np.array(segments), ends=np.array([1, 2]))


@pytest.mark.parametrize("make", [make_batches, make_compacts])
def test_a_batch_of_samples_without_a_target_is_named_once_for_each_stream(make, caplog):
    batch_module._warn_of_no_target.cache_clear()
    none = [-100, -100]
    for labels in ([[6, -100], [8, 9], none], [none, none, none]) * 2:
        make(*rows_with_labels(*labels), steps=[(0, 1), (0, 2), (0, 3)], positions="restart")
        make(*rows_with_labels(*labels), steps=[(0, 3)], positions="restart")
    said = [record.getMessage() for record in caplog.records]
    assert ["stream 4: a batch has its" in text for text in said] == [True, False]
    assert "stream 7: a batch has its samples but no target, so its mean loss is NaN" in said[1]


LENGTHS = [[5, 40, 7, 61, 12, 33, 1, 64, 9, 18, 100, 130] * 3]


def batches(folder, **packing):
    """All batches of an epoch, and the samples that were written."""
    written = conformance.write_streams(folder, LENGTHS)
    return list(conformance.make(written, packing={"padding_id": 9, **packing})), written


def slots(batch):
    """(row, sample, start, length, first slot, slots) of each segment."""
    at = [0] * len(batch["tokens"])
    for row, _, _, sample, start, length in batch["segments"].tolist():
        room = -(-length // 8) * 8
        yield row, sample, start, length, at[row], room
        at[row] += room


@pytest.mark.parametrize(
    "packing",
    [
        {},
        {"method": "next_fit"},
        {"method": "concat"},
        {"method": "two_tiers", "short_seq_len": 16},
        {"eos_id": 77, "bos_id": 78},
    ],
    ids=str,
)
def test_segments_lie_at_multiples_and_padding_behind_them_is_ignored(tmp_path, packing):
    found, written = batches(tmp_path, pad_to_multiple=8, **packing)
    added = [78] * ("bos_id" in packing), [77] * ("eos_id" in packing)

    num_tokens = 0
    for batch in found:
        tokens, labels = batch["tokens"].numpy(), batch["labels"].numpy()
        seen = np.zeros(tokens.shape, bool)
        for row, sample, start, length, at, room in slots(batch):
            own = np.concatenate([added[0], written.tokens[0][sample], added[1]]).astype(int)
            piece, nexts = own[start : start + length], own[start + 1 : start + length + 1]
            assert tokens[row, at : at + length].tolist() == piece.tolist()
            assert tokens[row, at + length : at + room].tolist() == [9] * (room - length)
            assert labels[row, at : at + len(nexts)].tolist() == nexts.tolist()
            assert (labels[row, at + len(nexts) : at + room] == -100).all()
            assert batch["input_pos"][row, at : at + room].tolist() == list(range(room))
            seen[row, at : at + room] = True
            num_tokens += length
        assert ((batch["document_ids"].numpy() > 0) == seen).all()
        assert (tokens[~seen] == 9).all()
        assert (labels[~seen] == -100).all()
    extra = len(added[0]) + len(added[1])
    assert num_tokens == sum(length + extra for length in LENGTHS[0])


def test_labels_of_a_column_lie_where_the_tokens_lie(tmp_path):
    targets = [np.arange(n, dtype=np.int32) + 1000 for n in LENGTHS[0]]
    written = conformance.write_streams(
        tmp_path, LENGTHS, columns={"labels": "ndarray:int32"}, values={"labels": targets}
    )
    streams = written.streams([{"labels": "labels", "labels_shifted": True}])
    dataset = conformance.PackedStreamingDataset(
        streams=streams,
        packing=conformance.Packing(max_seq_len=64, pad_to_multiple=8),
        batch_size=2,
    )

    for batch in dataset:
        labels = batch["labels"].numpy()
        for row, sample, start, length, at, room in slots(batch):
            want = targets[sample][start : start + length]
            assert labels[row, at : at + length].tolist() == want.tolist()
            assert (labels[row, at + length : at + room] == -100).all()
