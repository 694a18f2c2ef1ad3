"""The samples of each queue of an online worker, from arrival until packed: tokens, labels, extras.

::

    arrive          encode the tokens behind the others, and number the samples
    packed          copy each segment into its row
    a window ends   move the tokens that wait to the front

Packers get the numbers that the store gave to samples, so no sample has to be searched for. A
sample is kept from its first to its last token that waits. If no stream has labels or a mask, only
tokens are stored: each label is the next token.

Cost: about 0.1 us per sample, two copies per token and one check of each. Memory: the packers'
bounds, a window, a chunk, and the longest sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from streampack.gather.gather import Rows
from streampack.online.byte_budget import HeldMemory, payload_bytes
from streampack.online.item_decoder import Columns, segments_of
from streampack.online.plan import FlowPlan
from streampack.online.sample_store_kernels import (
    NUM_PLACE,
    NUMBER,
    OFFSET,
    copy_to_rows,
    encode,
    keep,
)
from streampack.special_ids import adds_ids, special_ids
from streampack.streams.sample_fields import Extras
from streampack.types import (
    IGNORED,
    LENGTH,
    SAMPLE,
    START,
    TOKENS,
    TOTAL,
    Int32Array,
    Int64Array,
    IntArray,
    Packs,
)

FEWEST_TOKENS = 1 << 14  # initial capacity
NO_VALUES = np.zeros(0, np.int32)
INVALID = np.iinfo(np.int32).min  # neither a token id nor a label


class SampleStore:
    """The samples of one queue; without labels in any stream, only tokens are stored."""

    def __init__(self, plan: FlowPlan, held: HeldMemory) -> None:
        self._packing = plan.packing
        self._names = plan.names
        self._held = held
        self._ids = (*special_ids(plan.packing), plan.packing.padding_id)
        self._adds_ids = adds_ids(plan.packing)
        self._has_labels = plan.has_labels
        self._first = 0  # number of the first sample
        self._places = np.zeros((0, NUM_PLACE), np.int64)
        self._tokens = np.empty(FEWEST_TOKENS, np.int32)
        self._labels = np.empty(FEWEST_TOKENS if plan.has_labels else 0, np.int32)
        self._used = 0
        self._extras: dict[int, Extras] = {}
        self.digests = np.zeros(len(plan.streams), np.int64)
        """Running digest of each stream's samples: tokens, labels, mask, token fields and spans of
        payloads, but not the payloads themselves, which may be any objects."""

    def extend(
        self, rows: Int64Array, columns: Columns, are_shifted: Sequence[bool]
    ) -> tuple[Int64Array, int]:
        """Store samples, given their rows, shape (n, 4), and columns.

        `are_shifted` says for each stream whether labels[i] is the target of token i + 1. Return
        their segments, shape (m, 6), with the store's numbers of samples, and the index of the
        first sample with an invalid token id or label; n: all are valid.
        """
        num, lengths, extras = len(rows), rows[:, TOKENS], columns[3]
        places = np.zeros((num, NUM_PLACE), np.int64)
        places[:, NUMBER], ends = rows[:, SAMPLE], np.cumsum(lengths)
        offset, num_tokens = self._used, int(ends[-1])
        places[:, OFFSET] = offset + ends - lengths
        first = self._first + len(self._places)
        self._places = np.concatenate([self._places, places])
        rows = rows.copy()
        rows[:, SAMPLE] = np.arange(first, first + num)
        segments = segments_of(rows, extras, self._packing, self._names)
        self._used += num_tokens
        if self._used > len(self._tokens):
            self._resize(2 * self._used, offset)
        room = self._tokens[offset : self._used], self._labels[offset : self._used]
        own, sizes, is_in_place = self._own_values(columns, lengths, room[0])
        hashes = np.zeros(num, np.int64)
        if extras:
            sizes[:, 3] = [0 if each is None else each.num_slots for each in extras]
            hashes[:] = [0 if each is None else each.hashed for each in extras]
            firsts = segments[segments[:, START] == 0]
            for number, total in firsts[:, [SAMPLE, TOTAL]].tolist():
                if (each := extras[number - first]) is not None:
                    self._extras[number] = own_extras = each.slice(0, total)
                    self._held.payloads += payload_bytes(own_extras.payloads)
        samples, digests = (rows, sizes, np.array(are_shifted)), (self.digests, hashes)
        first_bad = encode(room, samples, own, digests, self._ids, is_in_place)
        if self._has_labels:  # the last token of a truncated sample has no target
            index = segments[:, SAMPLE] - first
            is_cut = segments[:, TOTAL] < lengths[index]
            self._labels[places[index[is_cut], OFFSET] + segments[is_cut, TOTAL] - 1] = IGNORED
        return segments, int(first_bad)

    def _own_values(
        self, columns: Columns, lengths: Int64Array, room: Int32Array
    ) -> tuple[tuple[Int32Array, Int32Array, Int32Array], Int64Array, bool]:
        """Return tokens, labels and masks of all samples, their numbers, and if tokens are placed.

        Without labels and added ids, tokens are copied to their place only once.
        """
        num, own = len(lengths), [NO_VALUES] * 3
        sizes = np.zeros((num, 4), np.int64)
        is_in_place = False
        for kind, column in enumerate(columns[:3]):
            if not column:
                continue
            values = [NO_VALUES if row is None else row for row in column] if kind else column
            if kind or self._adds_ids or columns[3]:
                sizes[:, kind] = np.fromiter(map(len, values), np.int64, num)
            else:
                sizes[:, kind] = lengths
            num_own = int(sizes[:, kind].sum())
            if not kind and num_own == len(room):
                is_in_place, memory = True, room
            else:
                memory = np.empty(num_own, np.int32)
            own[kind] = _concatenated(values, memory)
        return (own[0], own[1], own[2]), sizes, is_in_place

    def _resize(self, size: int, used: int) -> None:
        for name in ("_tokens", "_labels") if self._has_labels else ("_tokens",):
            resized = np.empty(size, np.int32)
            resized[:used] = getattr(self, name)[:used]
            setattr(self, name, resized)

    def keep(self, segments: Int64Array) -> None:
        """Keep the samples of segments, shape (n, 6), and no others."""
        num = len(self._places)
        first = int(segments[:, SAMPLE].min()) - self._first if len(segments) else num
        self._places, self._first = self._places[first:].copy(), self._first + first
        most = max(self._used, FEWEST_TOKENS)
        room = self._tokens, self._labels
        segments = np.ascontiguousarray(segments)
        self._used = keep(self._places, self._first, segments, self._used, *room)
        if len(self._tokens) > 4 * most:  # after a long sample
            self._resize(2 * most, self._used)
        if self._extras:
            kept = set(segments[:, SAMPLE].tolist())
            for number in self._extras.keys() - kept:
                self._held.payloads -= payload_bytes(self._extras.pop(number).payloads)

    def take_extras(self, number: int, start: int, length: int) -> Extras | None:
        """Return the extra fields of a segment, if any; its payloads leave."""
        own = self._extras.get(number)
        if own is None:
            return None
        taken = own.take(start, start + length)
        self._held.payloads -= payload_bytes(taken.payloads)
        return taken

    def drop(self, segments: Int64Array) -> None:
        """Let go of the payloads of segments, shape (n, 6)."""
        for segment in segments[:, [SAMPLE, START, LENGTH]].tolist() if self._extras else ():
            self.take_extras(*segment)

    @property
    def samples(self) -> tuple[Int64Array, int, Int32Array, Int32Array]:
        """What `copy_to_rows` reads."""
        return self._places, self._first, self._tokens, self._labels


class BatchWriter:
    """Copies packs into the rows of batches, from the stores of a worker's queues."""

    def __init__(self, plan: FlowPlan, stores: Sequence[SampleStore]) -> None:
        self._packing = plan.packing
        self._has_labels, self._has_extras = plan.has_labels, plan.has_extras
        self._stores = stores
        self._token_fields = {k: v for each in plan.streams for k, v in each.token_fields.items()}
        fields = (name for each in plan.streams for name in each.payloads.payloads)
        self._payloads = tuple(dict.fromkeys(fields))
        self._rows: tuple[Int32Array, Int32Array] | None = None  # reused for each batch

    def write(
        self, packs: Packs, queues: Int64Array, shape: tuple[int, int]
    ) -> tuple[Rows, Packs, dict[str, Any]]:
        """Return rows of this shape, the packs with the sources' numbers of samples, extra fields.

        `queues` has the queue of each pack. Rows after the packs are padding. The next call reuses
        the rows' memory.
        """
        packing, num_packs = self._packing, len(queues)
        if self._rows is None or self._rows[0].shape != shape:
            labels_shape = shape if self._has_labels else (0, 0)
            self._rows = np.empty(shape, np.int32), np.empty(labels_shape, np.int32)
        tokens, labels = self._rows
        segments, multiple = np.ascontiguousarray(packs.segments), packing.pad_to_multiple or 1
        nexts = np.empty(len(segments), np.int64)
        found = np.empty((len(segments), 2), np.int64)
        for number in dict.fromkeys(queues.tolist()):
            copy_to_rows(
                self._stores[number].samples,
                (segments, packs.ends, queues),
                number,
                multiple,
                packing.padding_id,
                (tokens, labels, nexts, found),
            )
        tokens[num_packs:] = packing.padding_id
        labels[num_packs:] = IGNORED
        rows = Rows(
            tokens=tokens,
            next_tokens=nexts,
            labels=labels if self._has_labels else None,
            multiple=multiple,
        )
        extras = self._extra_fields(packs, queues, found[:, 1], shape)
        segments = segments.copy()
        segments[:, SAMPLE] = found[:, 0]
        return rows, Packs(segments=segments, ends=packs.ends), extras

    def _extra_fields(
        self, packs: Packs, queues: Int64Array, starts: Int64Array, shape: tuple[int, int]
    ) -> dict[str, Any]:
        """Return the extra fields of a batch; `starts` are the places of segments in their rows."""
        if not self._has_extras:
            return {}
        fields = {name: np.zeros(shape, dtype) for name, dtype in self._token_fields.items()}
        placed: dict[str, list[tuple[Any, int, int, int]]] = {name: [] for name in self._payloads}
        rows = np.repeat(np.arange(len(packs)), np.diff(packs.ends, prepend=0))
        own = packs.segments[:, [SAMPLE, START, LENGTH]]
        for segment, row, start in zip(own.tolist(), rows.tolist(), starts.tolist(), strict=True):
            extras = self._stores[queues[row]].take_extras(*segment)
            if extras is None:
                continue
            for name, values in extras.token_fields.items():
                fields[name][row, start : start + len(values)] = values
            for name, objects in extras.payloads.items():
                placed[name] += [(thing, row, start + a, start + b) for thing, a, b in objects]
        made: dict[str, Any] = {name: torch.from_numpy(values) for name, values in fields.items()}
        for name, things in placed.items():
            spans = np.array([place for _, *place in things], np.int64).reshape(-1, 3)
            made |= {name: [thing for thing, *_ in things], f"{name}_at": torch.from_numpy(spans)}
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
