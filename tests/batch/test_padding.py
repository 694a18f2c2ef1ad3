"""pad_to_multiple from streams to batches: each sample takes a multiple of slots."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import conformance

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
        {"split_gap": 0.0},
        {"method": "best_fit"},
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
