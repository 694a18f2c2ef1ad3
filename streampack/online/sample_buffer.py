"""Columnar buffer of online samples: tokens, labels and extras, from arrival until packed.

::

    arrive      put: append the tokens           settle: a table line and a segment row per sample
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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
    put_labels,
    settle_whole,
    take_out,
)
from streampack.online.samples import EncodedSample, Extras, SampleKey
from streampack.streams.iterable_stream import Plain, invalid_token_ids
from streampack.types import (
    IGNORED,
    NUM_COLUMNS,
    START,
    Int64Array,
    Packs,
    no_segments,
)

FEWEST_LINES = 256  # initial capacity
FEWEST_TOKENS = 1 << 14
NO_VALUES = np.zeros(0, np.int64)
Refuse: TypeAlias = Callable[[SampleKey, Int64Array, Int64Array], None]
"""Takes a bad sample's key, tokens, and labels if it has any; raises its error."""


class SampleBuffer:
    """The samples that one worker buffers.

    Args:
        packing: The packing options.
        token_fields: Names and dtypes of the fields with a value per token.
        payloads: Names of the fields that batches hold as lists.
        has_labels: Whether labels are stored; otherwise they follow from the tokens.
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
        self._token_fields = dict(token_fields or {})
        self._payloads = tuple(payloads)
        self._has_labels = has_labels
        # One line per piece, in arrival order, and the hash table that finds a sample's lines.
        self._table = np.zeros((FEWEST_LINES, NUM_TABLE), np.int64)
        self._heads = np.full(2 * FEWEST_LINES, -1)
        self._num_lines = self._num_ever = 0
        self._tokens = np.empty(FEWEST_TOKENS, np.int64)
        self._labels = np.empty(FEWEST_TOKENS if has_labels else 0, np.int64)
        self._used = 0
        self._staged: list[tuple[int, int, int, int]] = []  # samples put but not settled
        # The first staged sample with a label outside int32, with its tokens and labels.
        self._wrong: tuple[SampleKey, Int64Array, Int64Array] | None = None
        self._extras: dict[int, tuple[Extras, int]] = {}  # by line, with payload bytes
        self._rows: tuple[Int64Array, Int64Array] | None = None  # reused for each batch
        self.last: dict[int, list[int]] = {}
        """Address of each stream's last piece, buffered or not."""
        self.num_tokens = 0
        self.payload_bytes = 0
        self.high_water_tokens = 0

    @property
    def _live(self) -> Int64Array:
        """The lines with tokens left, shape (n, NUM_TABLE)."""
        lines = self._table[: self._num_lines]
        live: Int64Array = lines[lines[:, LEFT] > 0]
        return live

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def keys(self) -> list[SampleKey]:
        """Keys of the samples that are buffered, at least in part."""
        return list(dict.fromkeys(map(tuple, self._live[:, :KEY].tolist())))

    # Input.

    def put(self, key: SampleKey, plain: Plain, labels_shifted: bool | None) -> int:
        """Stage a whole sample that fits a pack; `settle` adds it to the table.

        Args:
            key: Stream, pass and sample.
            plain: Its arrays; they are copied.
            labels_shifted: Whether labels[i] is the target of token i + 1.

        Returns:
            The number of its tokens, including an added BOS and EOS.
        """
        tokens, labels, mask = plain
        num = len(tokens)
        if self._used + num + 2 > len(self._tokens):
            self._make_room(num + 2)
        begin = at = self._used
        end = at + num
        held, bos, eos = self._tokens, self._packing.bos_id, self._packing.eos_id
        if bos is not None and tokens[0] != bos:
            held[at] = bos
            at, end = at + 1, end + 1
        held[at:end] = tokens
        if eos is not None and held[end - 1] != eos:
            held[end] = eos
            end += 1
        if self._has_labels:
            own = NO_VALUES if labels is None else np.array(labels, np.int64)
            targets = NO_VALUES if mask is None else np.array(mask, np.int64)
            span, shifted = (at - begin, num), bool(labels_shifted)
            out = self._labels[begin:end]
            is_wrong = put_labels(held[begin:end], span, own, targets, shifted, out)
            if is_wrong and self._wrong is None:
                self._wrong = key, held[at : at + num].copy(), own
        self._used = end
        self._staged.append((*key, end - begin))
        return end - begin

    def settle(self, refuse: Refuse) -> Int64Array:
        """Add the staged samples to the table; return their segment rows, shape (n, 6).

        Args:
            refuse: Called with the first sample that has an invalid token id, or else the first
                with a label outside int32; it raises.
        """
        if not self._staged:
            return no_segments()
        self._make_lines(len(self._staged))
        staged = np.array(self._staged, np.int64)
        self._staged = []
        rows = np.empty((len(staged), NUM_COLUMNS), np.int64)
        num_tokens = int(staged[:, KEY].sum())
        begin = self._used - num_tokens
        held = (self._table, self._heads, self._tokens, self._labels)
        if settle_whole(held, staged, (self._num_lines, begin, self._num_ever), rows):
            self._check_own(rows, begin + np.cumsum(staged[:, KEY]), refuse)
        if self._wrong is not None:
            refuse(*self._wrong)
        lasts = dict(zip(staged[:, 0].tolist(), range(len(staged)), strict=True))
        for stream, at in lasts.items():
            self.last[stream] = self._table[self._num_lines + at, :OFFSET].tolist()
        self._add(len(rows), num_tokens)
        return rows

    def _check_own(self, rows: Int64Array, ends: Int64Array, refuse: Refuse) -> None:
        added = {self._packing.bos_id, self._packing.eos_id}
        for (stream, pass_, sample, *_, length), end in zip(
            rows.tolist(), ends.tolist(), strict=True
        ):
            tokens = self._tokens[end - length : end].copy()
            if any(token not in added for token in invalid_token_ids(tokens).tolist()):
                refuse((stream, pass_, sample), tokens, NO_VALUES)

    def hold(
        self, key: SampleKey, ready: EncodedSample, start: int, length: int, total: int
    ) -> None:
        """Buffer a piece of a sample until all of it is packed.

        Args:
            key: Stream, pass and sample.
            ready: The whole sample.
            start: First token of the piece.
            length: Tokens of the piece.
            total: Tokens of the sample that are packed.
        """
        self._make_lines(1)
        if self._used + length > len(self._tokens):
            self._make_room(length)
        begin, end = self._used, self._used + length
        tokens, labels, after = self._piece(ready, start, length, total)
        self._tokens[begin:end] = tokens
        if self._has_labels:
            self._labels[begin:end] = labels
        self._used = end
        rank = self._rank(key) if start else None
        line = self._table[self._num_lines]
        line[:KEY], line[START], line[SIZE], line[LEFT] = key, start, length, length
        extras = ready.extras(start, start + length)
        line[DIGEST] = _digest(tokens, labels, after, extras, total)
        line[OFFSET], line[AFTER] = begin, after
        line[RANK] = self._num_ever if rank is None else rank
        if extras is not None:
            size = extras.payload_bytes
            self._extras[self._num_lines] = extras, size
            self.payload_bytes += size
        enter(self._table, self._heads, self._num_lines, self._num_lines + 1)
        self.last[key[0]] = line[:OFFSET].tolist()
        self._add(1, length)

    def _piece(
        self, ready: EncodedSample, start: int, length: int, total: int
    ) -> tuple[Int64Array, Int64Array, int]:
        """Return a piece's tokens, its labels if they are stored, and its last token's target."""
        stop = start + length
        # The last token of a truncated sample has no target.
        is_cut = stop == total < len(ready.tokens)
        after = IGNORED if is_cut else int(ready.labels[stop - 1])
        labels = NO_VALUES
        if self._has_labels:
            labels = np.append(ready.labels[start : stop - 1], after)
        return ready.tokens[start:stop], labels, after

    def digest(self, ready: EncodedSample, start: int, length: int, total: int) -> int:
        """Return a 53-bit digest of a piece; see `hold` for the arguments.

        It covers tokens, labels, token fields and payload spans, but not the payloads themselves,
        which may be any objects.
        """
        extras = ready.extras(start, start + length)
        return _digest(*self._piece(ready, start, length, total), extras, total)

    def whole_digest(self, ready: EncodedSample) -> int:
        """Return the digest of a whole sample, before it is cut."""
        return self.digest(ready, 0, len(ready.tokens), len(ready.tokens))

    def _rank(self, key: SampleKey) -> int | None:
        """Return the rank of a sample's first buffered piece; None if there is none."""
        live = self._live
        same = live[(live[:, :KEY] == key).all(axis=1)]
        return int(same[0, RANK]) if len(same) else None

    def _make_lines(self, num: int) -> None:
        """Make room for `num` more table lines."""
        if self._num_lines + num <= len(self._table):
            return
        self._make_room(0)
        while self._num_lines + num > len(self._table) // 2:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._heads = np.full(2 * len(self._table), -1)
        self._find_again()

    def _add(self, num: int, num_tokens: int) -> None:
        self._num_lines += num
        self._num_ever += num
        self.num_tokens += num_tokens
        self.high_water_tokens = max(self.high_water_tokens, self.num_tokens)

    def _make_room(self, num_tokens: int) -> None:
        """Make room for more tokens: compact the live ones, and resize the arrays if needed."""
        staged = sum(length for *_, length in self._staged)
        first = self._used - staged
        waiting = self._tokens[first : self._used].copy(), self._labels[first : self._used].copy()
        is_live = self._table[: self._num_lines, LEFT] > 0
        line_of = np.cumsum(is_live) - 1
        self._extras = {
            int(line_of[line]): extra for line, extra in self._extras.items() if is_live[line]
        }
        self._num_lines = compact(self._table, self._num_lines, self._tokens, self._labels)
        self._find_again()
        lines = self._table[: self._num_lines]
        used = int(lines[-1, OFFSET] + lines[-1, SIZE]) if len(lines) else 0
        wanted = max(2 * (used + staged + num_tokens), FEWEST_TOKENS)
        if not wanted <= len(self._tokens) <= 4 * wanted:
            self._tokens = _resized(self._tokens, used, 2 * wanted)
            self._labels = _resized(self._labels, used, 2 * wanted if self._has_labels else 0)
        for held, values in zip((self._tokens, self._labels), waiting, strict=True):
            held[used : used + len(values)] = values
        self._used = used + staged

    def _find_again(self) -> None:
        self._heads.fill(-1)
        enter(self._table, self._heads, 0, self._num_lines)

    # State.

    def state_dict(self) -> list[list[int]]:
        """Return the addresses of the buffered pieces.

        An address is stream, pass, sample, start, length, tokens left, digest.
        """
        live = self._live
        if (np.diff(live[:, RANK]) < 0).any():
            live = live[np.argsort(live[:, RANK], kind="stable")]
        addresses: list[list[int]] = live[:, :OFFSET].tolist()
        return addresses

    def restore(self, address: Sequence[int], ready: EncodedSample, total: int) -> None:
        """Buffer the piece at a saved address again.

        Args:
            address: An address from `state_dict`.
            ready: The whole sample.
            total: Tokens of the sample that are packed.
        """
        stream, pass_, number, start, length, num_left = map(int, address[:DIGEST])
        key = (stream, pass_, number)
        self.hold(key, ready, start, length, total)
        self._table[self._num_lines - 1, LEFT] = num_left
        self.num_tokens -= length - num_left

    # Output.

    def rows(
        self, packs: Packs, num_rows: int, row_tokens: int | None = None
    ) -> tuple[Rows, dict[str, Any]]:
        """Return the tokens, labels and extra fields of packs, and free the used pieces.

        Args:
            packs: The segments of each row.
            num_rows: Number of rows; those after the packs are padding.
            row_tokens: Length of a row; None: max_seq_len.

        Returns:
            The rows, whose memory the next call reuses, and the extra fields.

        Raises:
            DataError: If a segment is not buffered.
        """
        shape = (num_rows, row_tokens or self._packing.max_seq_len)
        tokens, labels = self._empty_rows(shape)
        segments = np.ascontiguousarray(packs.segments)
        multiple = self._packing.pad_to_multiple or 1
        nexts = np.empty(len(segments), np.int64)
        # A segment may consist of several adjacent pieces, each with its own copy.
        copies = np.empty((len(segments) + self._num_lines, 5), np.int64)
        held = (self._table, self._heads, self._tokens, self._labels)
        made = (tokens, labels, nexts, copies)
        num_copies, missing = take_out(held, segments, packs.ends, multiple, made)
        if missing >= 0:
            stream, _, sample = segments[missing, :START].tolist()
            raise DataError(
                f"stream {stream}, sample {sample} is packed but not held: packed twice"
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

    def _empty_rows(self, shape: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
        if self._rows is None or self._rows[0].shape != shape:
            self._rows = (
                np.empty(shape, np.int64),
                np.empty(shape if self._has_labels else (0, 0), np.int64),
            )
        tokens, labels = self._rows
        tokens.fill(self._packing.padding_id)
        labels.fill(IGNORED)
        return tokens, labels

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


def _digest(
    tokens: Int64Array, labels: Int64Array, after: int, extras: Extras | None, total: int
) -> int:
    mixed = 0
    if extras is not None:
        rows = [values for values in extras.token_fields.values() if not values.dtype.hasobject]
        rows += [np.array([(a, b) for _, a, b in each]) for each in extras.payloads.values()]
        for values in rows:
            mixed = zlib.crc32(values.tobytes(), mixed)
    return int(digest_of(tokens, labels, after, (mixed << 30) ^ total))


def _resized(values: Int64Array, used: int, size: int) -> Int64Array:
    """Return an array of `size` that begins with the first `used` values."""
    resized = np.empty(size, np.int64)
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
    segments = np.concatenate([no_segments(), *packs])
    return Packs(segments=segments, ends=np.cumsum([len(pack) for pack in packs], dtype=np.int64))
