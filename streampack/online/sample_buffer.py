"""Columnar buffer of online samples: tokens, labels and extras, from arrival until packed.

::

    arrive      encode the tokens behind the others, add a line to the table for each sample
    packed      copy each segment into its row; a piece is freed with its last token
    full        compact the live tokens to the front; grow if more than half is live

A sample longer than a pack is buffered in pieces, one for each piece that the packer holds. So a
short remainder does not keep the whole sample alive. If no stream has labels or a mask, only tokens
are stored: each label is the next token.

A state holds addresses and digests of the pieces. The digests detect a source that has changed.

Cost: about 1 us per sample, two copies per token and one check of each. Memory: a few times the
packer's bound, and the one sample being sliced.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from streampack.config import Packing
from streampack.errors import DataError
from streampack.gather.gather import Rows
from streampack.online.sample_buffer_kernels import (
    AFTER,
    DIGEST,
    KEY,
    LEFT,
    NUM_TABLE,
    OFFSET,
    RANK,
    SIZE,
    compact,
    digest_of,
    enter,
    hold_whole,
    take_out,
)
from streampack.online.samples import EncodedSample, Extras, SampleKey
from streampack.special_ids import adds_ids, special_ids
from streampack.types import (
    IGNORED,
    LENGTH,
    NO_SEGMENTS,
    START,
    STREAM,
    Int32Array,
    Int64Array,
    IntArray,
    Packs,
)

FEWEST_LINES = 256  # initial capacity
FEWEST_TOKENS = 1 << 14
NO_VALUES = np.zeros(0, np.int32)
INVALID = np.iinfo(np.int32).min  # neither a token id nor a label


class SampleBuffer:
    """The samples that one worker buffers.

    `token_fields` are dtypes by name, `payloads` the fields that batches hold as lists. If not
    `has_labels`, labels are not stored, because they follow from the tokens.
    """

    def __init__(
        self,
        packing: Packing,
        token_fields: Mapping[str, str] | None = None,
        payloads: Sequence[str] = (),
        *,
        has_labels: bool = True,
    ) -> None:
        self._packing = packing
        self._ids = special_ids(packing)
        self._adds_ids = adds_ids(packing)
        self._token_fields = dict(token_fields or {})
        self._payloads = tuple(payloads)
        self._has_labels = has_labels
        # One line per piece, in arrival order, and the hash table that finds a sample's lines.
        self._table = np.zeros((FEWEST_LINES, NUM_TABLE), np.int64)
        self._heads = np.full(2 * FEWEST_LINES, -1)
        self._num_lines = self._num_ever = 0
        self._tokens = np.empty(FEWEST_TOKENS, np.int32)
        self._labels = np.empty(FEWEST_TOKENS if has_labels else 0, np.int32)
        self._used = 0
        self._extras: dict[int, tuple[Extras, int]] = {}  # by line, with payload bytes
        self._rows: tuple[Int32Array, Int32Array] | None = None  # reused for each batch
        self.last: dict[int, list[int]] = {}
        """Address of each stream's last piece, buffered or not."""
        self.num_tokens = 0
        self.payload_bytes = 0
        self.high_water_tokens = 0

    @property
    def _live(self) -> Int64Array:
        lines = self._table[: self._num_lines]
        live: Int64Array = lines[lines[:, LEFT] > 0]
        return live

    # Input.

    def extend(
        self, rows: Int64Array, columns: Sequence[Sequence[Any]], are_shifted: Sequence[bool]
    ) -> int:
        """Buffer copies of whole samples that each fit a pack.

        Args:
            rows: Their segment rows, shape (n, 6).
            columns: Their tokens; if labels are stored, also labels and loss masks, None for none.
            are_shifted: Whether labels[i] is the target of token i + 1, for each stream.

        Returns:
            The index of the first sample with an invalid token id or label; n: all are valid.
        """
        num, num_tokens = len(rows), int(rows[:, LENGTH].sum())
        place = self._reserve(num, num_tokens)
        sizes = np.zeros((num, 3), np.int64)
        own = [NO_VALUES] * 3
        for kind, column in enumerate(columns):
            values = column[:num]
            if kind:
                values = [NO_VALUES if row is None else row for row in values]
            if kind or self._adds_ids:
                sizes[:, kind] = np.fromiter(map(len, values), np.int64, num)
            else:
                sizes[:, kind] = rows[:, LENGTH]
            num_own = int(sizes[:, kind].sum())
            # Without labels and added ids, they are copied to their place only once.
            is_in_place = len(columns) == 1 and num_own == num_tokens
            memory = self._tokens[place[1] :] if is_in_place else np.empty(num_own, np.int32)
            own[kind] = _concatenated(values, memory[:num_own])
        held = (self._table, self._heads, self._tokens, self._labels)
        own_values = (own[0], own[1], own[2])
        shifted = np.array(are_shifted)
        first_bad = hold_whole(held, place, rows, own_values, sizes, shifted, self._ids)
        backwards = rows[::-1, STREAM].tolist()
        for stream in set(backwards):
            last = place[0] + num - 1 - backwards.index(stream)
            self.last[stream] = self._table[last, :OFFSET].tolist()
        return int(first_bad)

    def append_piece(
        self, key: SampleKey, ready: EncodedSample, start: int, length: int, total: int
    ) -> None:
        """Buffer tokens [start, start + length) of a sample, of which `total` will be packed."""
        rank = self._rank(key) if start else None
        number, begin, next_rank = self._reserve(1, length)
        tokens, labels, after = self._piece(ready, start, length, total)
        self._tokens[begin : begin + length] = tokens
        if self._has_labels:
            self._labels[begin : begin + length] = labels
        line = self._table[number]
        line[:KEY], line[START], line[SIZE], line[LEFT] = key, start, length, length
        extras = ready.extras and ready.extras.slice(start, start + length)
        line[DIGEST] = _digest(tokens, labels, after, extras, total)
        line[OFFSET], line[AFTER] = begin, after
        line[RANK] = next_rank if rank is None else rank
        if extras is not None:
            size = extras.payload_bytes
            self._extras[number] = extras, size
            self.payload_bytes += size
        enter(self._table, self._heads, number, number + 1)
        self.last[key[0]] = line[:OFFSET].tolist()

    def _piece(
        self, ready: EncodedSample, start: int, length: int, total: int
    ) -> tuple[IntArray, IntArray, int]:
        """Return a piece's tokens, its labels if they are stored, and its last token's target."""
        stop = start + length
        # The last token of a truncated sample has no target.
        is_cut = stop == total < len(ready.tokens)
        after = IGNORED if is_cut else int(ready.labels[stop - 1])
        labels: IntArray = NO_VALUES
        if self._has_labels:
            labels = np.append(ready.labels[start : stop - 1], after)
        return ready.tokens[start:stop], labels, after

    def digest(self, ready: EncodedSample, start: int, length: int, total: int) -> int:
        """Return a 53-bit digest of a piece; see `append_piece`.

        It covers tokens, labels, token fields and payload spans, but not the payloads themselves,
        which may be any objects.
        """
        extras = ready.extras and ready.extras.slice(start, start + length)
        return _digest(*self._piece(ready, start, length, total), extras, total)

    def whole_digest(self, ready: EncodedSample) -> int:
        """Return the digest of a whole sample, before it is cut."""
        return self.digest(ready, 0, len(ready.tokens), len(ready.tokens))

    def _rank(self, key: SampleKey) -> int | None:
        live = self._live
        same = live[(live[:, :KEY] == key).all(axis=1)]
        return int(same[0, RANK]) if len(same) else None

    def _reserve(self, num: int, num_tokens: int) -> tuple[int, int, int]:
        """Make room for pieces and their tokens; return the first's line, offset and rank."""
        if self._num_lines + num > len(self._table):
            self._make_room(0)
            while self._num_lines + num > len(self._table) // 2:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._heads = np.full(2 * len(self._table), -1)
            self._find_again()
        if self._used + num_tokens > len(self._tokens):
            self._make_room(num_tokens)
        first = (self._num_lines, self._used, self._num_ever)
        self._num_lines += num
        self._used += num_tokens
        self._num_ever += num
        self.num_tokens += num_tokens
        self.high_water_tokens = max(self.high_water_tokens, self.num_tokens)
        return first

    def _make_room(self, num_tokens: int) -> None:
        """Make room for more tokens: compact the live ones, and resize the arrays if needed."""
        is_live = self._table[: self._num_lines, LEFT] > 0
        line_of = np.cumsum(is_live) - 1
        self._extras = {
            int(line_of[line]): extra for line, extra in self._extras.items() if is_live[line]
        }
        self._num_lines = compact(self._table, self._num_lines, self._tokens, self._labels)
        self._find_again()
        lines = self._table[: self._num_lines]
        used = int(lines[-1, OFFSET] + lines[-1, SIZE]) if len(lines) else 0
        wanted = max(2 * (used + num_tokens), FEWEST_TOKENS)
        if not wanted <= len(self._tokens) <= 4 * wanted:
            self._tokens = _resized(self._tokens, used, 2 * wanted)
            self._labels = _resized(self._labels, used, 2 * wanted if self._has_labels else 0)
        self._used = used

    def _find_again(self) -> None:
        self._heads.fill(-1)
        enter(self._table, self._heads, 0, self._num_lines)

    # State.

    def state_dict(self) -> list[list[int]]:
        """Return the buffered pieces: stream, pass, sample, start, length, tokens left, digest."""
        live = self._live
        if (np.diff(live[:, RANK]) < 0).any():
            live = live[np.argsort(live[:, RANK], kind="stable")]
        addresses: list[list[int]] = live[:, :OFFSET].tolist()
        return addresses

    def restore(self, address: Sequence[int], ready: EncodedSample, total: int) -> None:
        """Buffer the piece at an address of `state_dict` again."""
        stream, pass_, number, start, length, num_left = map(int, address[:DIGEST])
        key = (stream, pass_, number)
        self.append_piece(key, ready, start, length, total)
        self._table[self._num_lines - 1, LEFT] = num_left
        self.num_tokens -= length - num_left

    # Output.

    def pop_rows(
        self, packs: Packs, num_rows: int, row_tokens: int | None = None
    ) -> tuple[Rows, dict[str, Any]]:
        """Return the tokens, labels and extra fields of packs, and free the used pieces.

        The next call reuses the rows' memory. Rows after the packs are padding, and rows have
        `row_tokens` tokens; None: max_seq_len.
        """
        shape = (num_rows, row_tokens or self._packing.max_seq_len)
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
            if line not in self._extras:
                continue
            part, _ = self._extras[line]
            for name, values in part.token_fields.items():
                fields[name][row, filled : filled + size] = values[first : first + size]
            for name, objects in part.payloads.items():
                placed[name] += [
                    (thing, row, filled + a - first, filled + b - first)
                    for thing, a, b in objects
                    if first <= a < first + size
                ]
        for line in set(copies[:, 2].tolist()):
            if not self._table[line, LEFT] and line in self._extras:
                self.payload_bytes -= self._extras.pop(line)[1]
        return {name: torch.from_numpy(values) for name, values in fields.items()} | _lists(placed)


def _concatenated(values: Sequence[IntArray], out: Int32Array) -> Int32Array:
    """Return arrays of integers behind each other in `out`; values outside int32 are INVALID."""
    try:
        np.concatenate(values, out=out, casting="safe")
    except TypeError:  # a wider type than int32
        wide = np.concatenate(values, dtype=np.int64, casting="unsafe")
        out[:] = wide
        out[out != wide] = INVALID
    return out


def _digest(
    tokens: IntArray, labels: IntArray, after: int, extras: Extras | None, total: int
) -> int:
    mixed = 0
    if extras is not None:
        rows = [values for values in extras.token_fields.values() if not values.dtype.hasobject]
        rows += [np.array([(a, b) for _, a, b in each]) for each in extras.payloads.values()]
        for values in rows:
            mixed = zlib.crc32(values.tobytes(), mixed)
    return int(digest_of(tokens, labels, after, (mixed << 30) ^ total))


def _resized(values: Int32Array, used: int, size: int) -> Int32Array:
    resized = np.empty(size, np.int32)
    resized[: min(used, size)] = values[: min(used, size)]
    return resized


def _lists(placed: dict[str, list[tuple[Any, int, int, int]]]) -> dict[str, Any]:
    """Return each payload field as a list, with its row and span tensor, shape (n, 3)."""
    lists: dict[str, Any] = {}
    for name, objects in placed.items():
        lists[name] = [thing for thing, *_ in objects]
        at = np.array([place for _, *place in objects], np.int64).reshape(-1, 3)
        lists[f"{name}_at"] = torch.from_numpy(at)
    return lists


def joined(packs: Sequence[Int64Array]) -> Packs:
    """Join packs, each given as its segment rows."""
    ends = list(accumulate(map(len, packs)))
    return Packs(segments=np.concatenate([NO_SEGMENTS, *packs]), ends=np.array(ends, np.int64))
