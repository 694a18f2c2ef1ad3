"""Streams with known tokens, datasets over them, and checks; see streampack.testing for pictures.

`make` builds a dataset over streams from `write_streams`, in which every token encodes its own
position (see `tests/helpers/builders.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream
from streampack.testing import assert_exactly_once
from streampack.testing.shown import all_rows, in_slot_order, rows, show, steps, worlds  # noqa: F401
from streampack.world import World
from tests.helpers import builders


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Written:
    """Streams on disk: their folders, and the tokens of each sample."""

    paths: tuple[Path, ...]
    tokens: tuple[list[np.ndarray], ...]

    def __repr__(self) -> str:
        return f"Written({self.paths[0].parent})"  # a failing test need not print every token

    @property
    def lengths(self) -> list[list[int]]:
        return [[len(sample) for sample in stream] for stream in self.tokens]

    def streams(self, weights: Sequence[dict[str, Any]] | None = None) -> list[Stream]:
        weights = weights or [{}] * len(self.paths)
        return [Stream(local=str(p), **w) for p, w in zip(self.paths, weights, strict=True)]


def write_streams(folder: Path, all_lengths: Sequence[Sequence[int]], **options: Any) -> Written:
    """Write one stream for each list of lengths; `options` are those of the builders."""
    written = [
        builders.write_stream_files(folder / f"s{seed}", lengths, seed=seed, **options)
        for seed, lengths in enumerate(all_lengths)
    ]
    return Written(paths=tuple(p for p, _ in written), tokens=tuple(t for _, t in written))


def make(
    written: Written,
    *,
    weights: Sequence[dict[str, Any]] | None = None,
    max_seq_len: int = 64,
    packing: dict[str, Any] | None = None,
    mixing: dict[str, Any] | None = None,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> PackedStreamingDataset:
    """A dataset over written streams, in a single process unless `options` has a world."""
    return PackedStreamingDataset(
        streams=written.streams(weights),
        packing=Packing(max_seq_len=max_seq_len, **(packing or {})),
        mixing=Mixing(**(mixing or {})),
        order=Order(**{"seed": 3, **(order or {})}),
        **{"batch_size": 2, "world": World(), **options},
    )


def segments_of(shown: Iterable[tuple[bytes, ...]]) -> np.ndarray:
    """The segments of shown packs: stream, pass, sample, start, length; shape (n, 5)."""
    parts = [np.frombuffer(row[0], np.int64).reshape(-1, 5) for row in shown]
    return np.concatenate([np.zeros((0, 5), np.int64), *parts])


def check_exactly_once(
    shown: Sequence[tuple[bytes, ...]], written: Written, quotas: Sequence[int]
) -> None:
    """Check that packs have `quotas[s]` samples of stream s, each complete and once per pass."""
    segments = segments_of(shown)
    batch = {"segments": np.insert(segments, 0, 0, axis=1)}
    assert_exactly_once([batch], written.lengths, quotas)


def check_tokens(batch: dict[str, Any], written: Written, padding_id: int = 0) -> None:
    """Check every token and label of a batch against what was written."""
    tokens, labels = batch["tokens"].numpy(), batch["labels"].numpy()
    want_tokens = np.full_like(tokens, padding_id)
    want_labels = np.full_like(labels, -100)
    at = [0] * len(tokens)
    for row, stream, _, sample, start, length in batch["segments"].tolist():
        own = written.tokens[stream][sample].astype(np.int64)
        here = slice(at[row], at[row] + length)
        want_tokens[row, here] = own[start : start + length]
        nexts = own[start + 1 : start + length + 1]
        want_labels[row, at[row] : at[row] + len(nexts)] = nexts
        at[row] += length
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_array_equal(labels, want_labels)
