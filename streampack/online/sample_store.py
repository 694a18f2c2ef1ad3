"""Columnar store of online samples: tokens, labels and extras, from arrival until packed.

::

    arrive      encode the tokens behind the others, add a line to the table for each piece
    packed      copy each segment into its row; a piece is freed with its last token
    full        compact the live tokens to the front; grow if more than half is live

A sample longer than a pack is stored in pieces, so a short remainder does not keep the whole sample
alive. If no stream has labels or a mask, only tokens are stored: each label is the next token.

Cost: about 0.1 us per sample, two copies per token and one check of each. Memory: a few times the
packers' bounds, a chunk, and the longest sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from streampack.config import Packing
from streampack.errors import DataError
from streampack.gather.gather import Rows
from streampack.online.byte_budget import payload_bytes
from streampack.online.item_decoder import Columns, Extras, segments_of
from streampack.online.sample_store_kernels import (
    LEFT,
    NUM_TABLE,
    OFFSET,
    SERIAL,
    SIZE,
    compact,
    enter,
    hold,
    release,
    take_out,
)
from streampack.special_ids import adds_ids, special_ids
from streampack.streams import IterableStream
from streampack.types import (
    LENGTH,
    START,
    TOKENS,
    Int32Array,
    Int64Array,
    IntArray,
    Packs,
)

FEWEST_LINES = 256  # initial capacity
FEWEST_TOKENS = 1 << 14
NO_VALUES = np.zeros(0, np.int32)
INVALID = np.iinfo(np.int32).min  # neither a token id nor a label


class SampleStore:
    """The samples that one worker keeps; without labels in any stream, only tokens are stored."""

    def __init__(
        self, packing: Packing, streams: Sequence[IterableStream], *, has_labels: bool
    ) -> None:
        self._packing = packing
        self._names = [stream.name or "" for stream in streams]
        self._ids = (*special_ids(packing), packing.padding_id)
        self._adds_ids = adds_ids(packing)
        self._token_fields = {k: v for stream in streams for k, v in stream.token_fields.items()}
        self._payloads = tuple(dict.fromkeys(k for stream in streams for k in stream.payloads))
        self._has_labels = has_labels
        # One line per piece, in arrival order, and the hash table that finds a sample's lines.
        self._table = np.zeros((FEWEST_LINES, NUM_TABLE), np.int64)
        self._heads = np.full(2 * FEWEST_LINES, -1)
        self._num_lines = self._num_ever = 0
        self._tokens = np.empty(FEWEST_TOKENS, np.int32)
        self._labels = np.empty(FEWEST_TOKENS if has_labels else 0, np.int32)
        self._used = 0
        self._extras: dict[int, tuple[Extras, int]] = {}  # by serial number, with payload bytes
        self._rows: tuple[Int32Array, Int32Array] | None = None  # reused for each batch
        self.digests = np.zeros(len(streams), np.int64)
        """Running digest of each stream's samples: tokens, labels, mask, token fields and spans of
        payloads, but not the payloads themselves, which may be any objects."""
        self.num_tokens = 0
        """Tokens that packers and packs hold, without those that wait for a packer."""
        self.payload_bytes = 0
        self.high_water_tokens = 0

    # Input.

    def extend(
        self, rows: Int64Array, columns: Columns, are_shifted: Sequence[bool]
    ) -> tuple[Int64Array, int]:
        """Store samples, given their rows, shape (n, 4), and columns.

        `are_shifted` says for each stream whether labels[i] is the target of token i + 1. Return
        their segments, shape (m, 6), and the index of the first sample with an invalid token id or
        label; n: all are valid.
        """
        extras = columns[3]
        segments = segments_of(rows, extras, self._packing, self._names)
        num, num_tokens = len(rows), int(rows[:, TOKENS].sum())
        _, offset, serial = place = self._reserve(len(segments), num_tokens)
        sizes = np.zeros((num, 4), np.int64)
        own = [NO_VALUES] * 3
        is_in_place = False
        for kind, column in enumerate(columns[:3]):
            if not column:
                continue
            values = [NO_VALUES if row is None else row for row in column] if kind else column
            if kind or self._adds_ids or extras:
                sizes[:, kind] = np.fromiter(map(len, values), np.int64, num)
            else:
                sizes[:, kind] = rows[:, TOKENS]
            num_own = int(sizes[:, kind].sum())
            # Without labels and added ids, they are copied to their place only once.
            if not kind and num_own == num_tokens:
                is_in_place, memory = True, self._tokens[offset:]
            else:
                memory = np.empty(num_own, np.int32)
            own[kind] = _concatenated(values, memory[:num_own])
        hashes = np.zeros(num, np.int64)
        if extras:
            sizes[:, 3] = [0 if each is None else each.num_slots for each in extras]
            hashes[:] = [0 if each is None else each.hashed for each in extras]
            self._hold_extras(rows, extras, segments, serial)
        samples = rows, sizes, np.array(are_shifted), segments
        held = (self._table, self._heads, self._tokens, self._labels)
        rows_of = own[0], own[1], own[2]
        digests = self.digests, hashes
        first_bad = hold(held, place, samples, rows_of, digests, self._ids, is_in_place)
        return segments, int(first_bad)

    def _hold_extras(
        self, rows: Int64Array, extras: Sequence[Extras | None], segments: Int64Array, serial: int
    ) -> None:
        """Store the extras of each piece."""
        samples = dict(zip(map(tuple, rows[:, :TOKENS].tolist()), extras, strict=True))
        for piece, segment in enumerate(segments.tolist()):
            each = samples[tuple(segment[:START])]
            if each is None:
                continue
            part = each.slice(segment[START], segment[START] + segment[LENGTH])
            size = payload_bytes(part.payloads)
            self._extras[serial + piece] = part, size
            self.payload_bytes += size

    def count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.high_water_tokens = max(self.high_water_tokens, self.num_tokens)

    def _reserve(self, num_lines: int, num_tokens: int) -> tuple[int, int, int]:
        is_full = self._num_lines + num_lines > len(self._table)
        if is_full or self._used + num_tokens > len(self._tokens):
            self._make_room(num_lines, num_tokens)
        first = (self._num_lines, self._used, self._num_ever)
        self._num_lines += num_lines
        self._used += num_tokens
        self._num_ever += num_lines
        return first

    def _make_room(self, num_lines: int, num_tokens: int) -> None:
        """Compact the live pieces, and resize the arrays where they have not room for so many."""
        self._num_lines = compact(self._table, self._num_lines, self._tokens, self._labels)
        while self._num_lines + num_lines > len(self._table) // 2:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._heads = np.full(2 * len(self._table), -1)
        enter(self._table, self._heads, 0, self._num_lines)
        lines = self._table[: self._num_lines]
        used = int(lines[-1, OFFSET] + lines[-1, SIZE]) if len(lines) else 0
        wanted = max(2 * (used + num_tokens), FEWEST_TOKENS)
        if not wanted <= len(self._tokens) <= 4 * wanted:
            self._tokens = _resized(self._tokens, used, 2 * wanted)
            self._labels = _resized(self._labels, used, 2 * wanted if self._has_labels else 0)
        self._used = used

    # Output.

    def free(self, segments: Int64Array) -> None:
        """Free segments, shape (n, 6), of samples that were read again."""
        release(self._table, self._heads, np.ascontiguousarray(segments))
        lines = self._table[: self._num_lines]
        for serial in lines[lines[:, LEFT] == 0, SERIAL].tolist() if self._extras else ():
            self.payload_bytes -= self._extras.pop(serial, (None, 0))[1]

    def pop_rows(
        self, packs: Packs, num_rows: int, row_tokens: int | None = None
    ) -> tuple[Rows, dict[str, Any]]:
        """Return the tokens, labels and extra fields of packs, and free the used pieces.

        The next call reuses the rows' memory. Rows after the packs are padding, and rows have
        `row_tokens` tokens, or None for as many as a pack has.
        """
        shape = (num_rows, row_tokens or self._packing.row_tokens)
        if self._rows is None or self._rows[0].shape != shape:
            labels_shape = shape if self._has_labels else (0, 0)
            self._rows = (np.empty(shape, np.int32), np.empty(labels_shape, np.int32))
        tokens, labels = self._rows
        segments = np.ascontiguousarray(packs.segments)
        multiple = self._packing.pad_to_multiple or 1
        nexts = np.empty(len(segments), np.int64)
        # A segment may consist of several adjacent pieces, each with its own copy.
        copies = np.empty((len(segments) + self._num_lines, 5), np.int64)
        held = (self._table, self._heads, self._tokens, self._labels)
        made = (tokens, labels, nexts, copies)
        padding_id = self._packing.padding_id
        num_copies, missing = take_out(held, (segments, packs.ends), multiple, padding_id, made)
        if missing >= 0:
            stream, _, sample = segments[missing, :START].tolist()
            raise DataError(
                f"stream {stream}, sample {sample} is packed but not held; "
                "a packer must return each segment once"
            )
        copies = copies[:num_copies]
        self.num_tokens -= int(copies[:, 4].sum())
        rows = Rows(
            tokens=tokens,
            next_tokens=nexts,
            labels=labels if self._has_labels else None,
            multiple=multiple,
        )
        return rows, self._extra_fields(copies, shape)

    def _extra_fields(self, copies: Int64Array, shape: tuple[int, int]) -> dict[str, Any]:
        if not (self._token_fields or self._payloads):
            return {}
        fields = {name: np.zeros(shape, dtype) for name, dtype in self._token_fields.items()}
        placed: dict[str, list[tuple[Any, int, int, int]]] = {name: [] for name in self._payloads}
        for row, filled, line, first, size in copies.tolist():
            serial = int(self._table[line, SERIAL])
            if serial not in self._extras:
                continue
            part, _ = self._extras[serial]
            for name, values in part.token_fields.items():
                fields[name][row, filled : filled + size] = values[first : first + size]
            for name, objects in part.payloads.items():
                placed[name] += [
                    (thing, row, filled + a - first, filled + b - first)
                    for thing, a, b in objects
                    if first <= a < first + size
                ]
        for left, serial in self._table[np.unique(copies[:, 2])][:, [LEFT, SERIAL]].tolist():
            if not left:
                self.payload_bytes -= self._extras.pop(serial, (None, 0))[1]
        made: dict[str, Any] = {name: torch.from_numpy(values) for name, values in fields.items()}
        for name, found in placed.items():
            spans = np.array([place for _, *place in found], np.int64).reshape(-1, 3)
            made |= {name: [thing for thing, *_ in found], f"{name}_at": torch.from_numpy(spans)}
        return made


def _concatenated(values: Sequence[IntArray], out: Int32Array) -> Int32Array:
    """Return arrays of integers behind each other in `out`; values outside int32 are INVALID."""
    try:
        np.concatenate(values, out=out, casting="safe")
    except TypeError:  # a wider type than int32
        wide = np.concatenate(values, dtype=np.int64, casting="unsafe")
        out[:] = wide
        out[out != wide] = INVALID
    return out


def _resized(values: Int32Array, used: int, size: int) -> Int32Array:
    resized = np.empty(size, np.int32)
    resized[: min(used, size)] = values[: min(used, size)]
    return resized
