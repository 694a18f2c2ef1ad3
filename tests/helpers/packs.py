"""Native batches for tests, built token by token without streampack's kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

VOCABULARY = 64


def native_batch(
    rows: Sequence[Sequence[int]],
    row_tokens: int,
    *,
    seed: int = 0,
    multiple: int = 1,
    cuts: Collection[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Return a batch of packs with random tokens in 1..VOCABULARY - 1."""
    generator = np.random.Generator(np.random.Philox(seed))
    shape = (len(rows), row_tokens)
    tokens, labels = np.zeros(shape, np.int64), np.full(shape, -100, np.int64)
    input_pos, document_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    cu_seqlens, segments = [0], []
    for row, lengths in enumerate(rows):
        at = 0
        for number, length in enumerate(lengths):
            drawn = generator.integers(1, VOCABULARY, length + 1)
            room = -(-length // multiple) * multiple
            tokens[row, at : at + length] = drawn[:-1]
            labels[row, at : at + length - 1] = drawn[1:-1]
            if (row, number) in cuts:
                labels[row, at + length - 1] = drawn[-1]
            input_pos[row, at : at + room] = np.arange(room)
            document_ids[row, at : at + room] = number + 1
            segments.append([row, 0, 0, len(segments), 0, length])
            at += room
            cu_seqlens.append(row * row_tokens + at)
        if at > row_tokens:
            raise ValueError(f"row {row} needs {at} tokens")
        if at < row_tokens:
            input_pos[row, at:] = np.arange(row_tokens - at)
            cu_seqlens.append((row + 1) * row_tokens)
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "input_pos": torch.from_numpy(input_pos),
        "document_ids": torch.from_numpy(document_ids),
        "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32),
        "max_seqlen": max(b - a for a, b in pairwise(cu_seqlens)),
        "segments": torch.tensor(segments, dtype=torch.int64).reshape(-1, 6),
        "epoch": 3,
        "position": 40,
    }


def samples_of(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the row, first token and length of each segment, found token by token."""
    found = []
    counts = dict.fromkeys(range(len(batch["tokens"])), 0)
    for row, _, _, _, _, length in batch["segments"].tolist():
        counts[row] += 1
        ids = batch["document_ids"][row].tolist()
        found.append((row, ids.index(counts[row]), length))
    return found


ROWS_OF_4 = [[7, 12, 5], [9, 1], [24], []]
"""Four packs of 24: a full one, one with padding, a single sample, and only padding."""
