"""Samples of iterables between their arrival and their packs: tokens, labels and extras, until all
has left.

::

    arrive      keep tokens and labels, hand the packer (stream, pass, sample, start, length, total)
    packed      copy each segment into its row; a chunk is let go with its last token

A sample longer than a pack is held in chunks, one for each piece that the packer has, so that its
rest in a buffer does not keep all of it alive.

Cost: two copies a token. Memory: what the packer's bound allows, and the one sample being sliced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streampack.config import Packing
from streampack.errors import DataError
from streampack.pack import fit_samples
from streampack.read import Rows
from streampack.streams import IterableSample
from streampack.types import LENGTH, START, STREAM, TOTAL, Int64Array, Packs, no_segments

__all__ = ["HeldSamples", "Key", "Prepared", "prepare", "segment_rows", "shifted_labels"]

IGNORED = -100
Key = tuple[int, int, int]  # stream, pass, sample


def shifted_labels(
    sample: IterableSample, packing: Packing, *, labels_shifted: bool
) -> tuple[Int64Array, Int64Array]:
    """Return a sample's tokens and shifted labels, with BOS and EOS where they are missing.

    A token is a target if its labels and loss mask say so; an added EOS goes by the token before
    it.

    Args:
        sample: Tokens, and labels or a loss mask if there are any.
        packing: Says which ids to add.
        labels_shifted: Whether labels[i] speaks of token i + 1 (True) or of token i.

    Returns:
        Tokens and labels, both of shape (n,).

    >>> sample = IterableSample(tokens=np.array([5, 6]), labels=None, loss_mask=None)
    >>> [part.tolist() for part in shifted_labels(sample, Packing(max_seq_len=8, eos_id=1),
    ...                                           labels_shifted=False)]
    [[5, 6, 1], [6, 1, -100]]
    """
    tokens = sample.tokens
    targets = tokens.copy()  # targets[i]: token i as a target, or IGNORED
    after = None  # the last label of a shifted column, which speaks of what follows
    if sample.labels is not None and labels_shifted:
        targets[0], targets[1:], after = IGNORED, sample.labels[:-1], int(sample.labels[-1])
    elif sample.labels is not None:
        targets = sample.labels.copy()
    if sample.loss_mask is not None:
        targets[sample.loss_mask == 0] = IGNORED
    bos, eos = packing.bos_id, packing.eos_id
    is_target = targets[-1] != IGNORED if after is None else after != IGNORED
    last = IGNORED if after is None else after
    if bos is not None and tokens[0] != bos:
        tokens, targets = np.append(bos, tokens), np.append(IGNORED, targets)
    if eos is not None and tokens[-1] != eos:
        tokens, targets = np.append(tokens, eos), np.append(targets, eos if is_target else IGNORED)
        last = IGNORED
    return tokens, np.append(targets[1:], last)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A sample, or a piece of one, as packs will hold it."""

    tokens: Int64Array
    """Shape (n,)."""
    labels: Int64Array
    """Shifted, shape (n,)."""
    token_fields: dict[str, Any]
    """Arrays of shape (n,)."""
    payloads: dict[str, list[tuple[Any, int, int]]]
    """Objects, each with the first token that it stands for and one past the last."""

    def piece(self, start: int, stop: int) -> Prepared:
        """Return a copy of a part; a payload belongs to the part that its first token lies in."""
        return Prepared(
            tokens=self.tokens[start:stop].copy(),
            labels=self.labels[start:stop].copy(),
            token_fields={k: v[start:stop].copy() for k, v in self.token_fields.items()},
            payloads={
                name: [(o, a - start, b - start) for o, a, b in objects if start <= a < stop]
                for name, objects in self.payloads.items()
            },
        )


def prepare(sample: IterableSample, packing: Packing, *, labels_shifted: bool) -> Prepared:
    """Return a sample with BOS, EOS and the slots that its payloads take, and shifted labels.

    >>> sample = IterableSample(tokens=np.array([5, 6]), labels=None, loss_mask=None, extra_cost=2)
    >>> ready = prepare(sample, Packing(max_seq_len=8, padding_id=9), labels_shifted=False)
    >>> ready.tokens.tolist(), ready.labels.tolist()
    ([5, 6, 9, 9], [6, -100, -100, -100])
    """
    tokens, labels = shifted_labels(sample, packing, labels_shifted=labels_shifted)
    if not (sample.extra_cost or sample.payloads or sample.token_fields):
        return Prepared(tokens=tokens, labels=labels, token_fields={}, payloads={})
    num_own = len(sample.tokens)
    lead = int(packing.bos_id is not None and sample.tokens[0] != packing.bos_id)
    tail = len(tokens) - num_own - lead + sample.extra_cost
    if sample.extra_cost:
        tokens = np.append(tokens, np.full(sample.extra_cost, packing.padding_id))
        labels = np.append(labels, np.full(sample.extra_cost, IGNORED))
    whole = len(tokens)
    payloads = {
        name: [
            (thing, int(span[0]) + lead, int(span[1]) + lead)
            for thing, span in zip(objects, sample.spans[name], strict=True)
        ]
        if name in sample.spans
        else [(thing, 0, whole) for thing in objects]
        for name, objects in sample.payloads.items()
    }
    fields = {name: np.pad(values, (lead, tail)) for name, values in sample.token_fields.items()}
    return Prepared(tokens=tokens, labels=labels, token_fields=fields, payloads=payloads)


def segment_rows(
    key: Key, ready: Prepared, packing: Packing, names: Sequence[str], *, may_split: bool
) -> Int64Array:
    """Return the segments that a sample becomes, shape (n, 6); none if it is dropped.

    A sample with payloads is cut between their spans only, and only if it may be split.

    Raises:
        DataError: If it does not fit a pack and may not be cut, or a span is longer than a pack.
    """
    length, size = len(ready.tokens), packing.max_seq_len
    spans = [(a, b) for objects in ready.payloads.values() for _, a, b in objects]
    if length <= size or not spans or packing.overflow in ("drop", "error"):
        return fit_samples(np.array([[*key, length]]), size, packing.overflow, names)
    where = f"stream {names[key[0]]!r}, sample {key[2]} of {length} tokens"
    if packing.overflow == "split" and not may_split:
        raise DataError(
            f"{where} has payloads, so it is not cut, and does not fit max_seq_len={size}; set "
            "split_payloads=True in its stream, overflow to truncate or drop, or raise max_seq_len"
        )
    ends = _cuts(length, packing, spans, where)
    if packing.overflow == "truncate":
        ends = ends[:1]
    starts = [0, *ends[:-1]]
    rows = [[*key, start, end - start, ends[-1]] for start, end in zip(starts, ends, strict=True)]
    return np.array(rows, np.int64)


def _cuts(length: int, packing: Packing, spans: list[tuple[int, int]], where: str) -> list[int]:
    """Return where each piece of at most a pack ends, never within a span."""
    size, multiple = packing.max_seq_len, packing.pad_to_multiple or 1
    ends: list[int] = []
    start = 0
    while start < length:
        end = min(start + size, length)
        # Spans may overlap, so one step back may lead into another span.
        while cut := [a for a, b in spans if a < end < b]:
            # Only a sample's last piece has padding behind it, so the others need none.
            end = start + (min(cut) - start) // multiple * multiple
        if end <= start:
            longest = max(b - a for a, b in spans)
            raise DataError(
                f"{where} has a payload that stands for up to {longest} tokens, which no pack of "
                f"max_seq_len={size} can take uncut where pieces end at multiples of {multiple}; "
                "raise max_seq_len"
            )
        ends.append(end)
        start = end
    return ends


@dataclass(slots=True)
class _Chunk:
    start: int
    """Of the sample's tokens, the first that this holds."""
    part: Prepared
    num_left: int


class HeldSamples:
    """The samples that one worker holds.

    Args:
        packing: What the packs are made with.
        token_fields: Fields that batches hold for each token, and their dtypes.
        payloads: Fields that batches hold as lists.
    """

    def __init__(
        self,
        packing: Packing,
        token_fields: Mapping[str, str] | None = None,
        payloads: Sequence[str] = (),
    ) -> None:
        self._packing = packing
        self._token_fields = dict(token_fields or {})
        self._payloads = tuple(payloads)
        self._chunks: dict[Key, list[_Chunk]] = {}
        self.num_tokens = 0
        self.high_water_tokens = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def keys(self) -> list[Key]:
        """Which samples are held, at least in part."""
        return list(self._chunks)

    def hold(self, key: Key, ready: Prepared, start: int, length: int, *, ends: bool) -> None:
        """Keep a piece of a sample until all of it has left.

        Args:
            key: Stream, pass and sample.
            ready: The whole sample.
            start: Where the piece begins.
            length: Its tokens.
            ends: Whether nothing of the sample follows, even if it has more tokens.
        """
        stop = start + length
        is_whole = length == len(ready.tokens)
        part = ready if is_whole else ready.piece(start, stop)
        if ends and stop < len(ready.tokens):
            part.labels[-1] = IGNORED  # it was truncated: its last token has nothing to predict
        self._chunks.setdefault(key, []).append(_Chunk(start, part, length))
        self.num_tokens += length
        self.high_water_tokens = max(self.high_water_tokens, self.num_tokens)

    def state_dict(self) -> list[list[int]]:
        """Return what is held, as addresses: stream, pass, sample, start, length, tokens left."""
        return [
            [*key, chunk.start, len(chunk.part.tokens), chunk.num_left]
            for key, chunks in self._chunks.items()
            for chunk in chunks
        ]

    def restore(self, address: Sequence[int], ready: Prepared, total: int) -> None:
        """Hold again what an address says.

        Args:
            address: One of `state_dict`.
            ready: The whole sample.
            total: Tokens of it that packs take.
        """
        stream, pass_, number, start, length, num_left = map(int, address)
        key = (stream, pass_, number)
        self.hold(key, ready, start, length, ends=start + length == total)
        self._chunks[key][-1].num_left = num_left
        self.num_tokens -= length - num_left

    def _find(self, key: Key, start: int) -> _Chunk:
        for chunk in self._chunks.get(key, ()):
            if chunk.start <= start < chunk.start + len(chunk.part.tokens):
                return chunk
        raise DataError(f"stream {key[0]}, sample {key[2]} is packed but not held: packed twice")

    def _let_go(self, key: Key, chunk: _Chunk, length: int) -> None:
        self.num_tokens -= length
        chunk.num_left -= length
        if chunk.num_left == 0:
            chunks = self._chunks[key]
            chunks.remove(chunk)
            if not chunks:
                del self._chunks[key]

    def rows(
        self, packs: Packs, num_rows: int, row_tokens: int | None = None
    ) -> tuple[Rows, dict[str, Any]]:
        """Return the tokens, labels and extra fields of packs, and let go of what is used up.

        Args:
            packs: Which segments to put into each row.
            num_rows: How many rows; those after the packs are padding.
            row_tokens: How long they are; None: max_seq_len.
        """
        shape = (num_rows, row_tokens or self._packing.max_seq_len)
        tokens = np.full(shape, self._packing.padding_id, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        fields = {name: np.zeros(shape, dtype) for name, dtype in self._token_fields.items()}
        placed: dict[str, list[tuple[Any, int, int, int]]] = {name: [] for name in self._payloads}
        multiple = self._packing.pad_to_multiple or 1
        for row in range(len(packs)):
            filled = 0
            for segment in packs[row].tolist():
                key, start, length = tuple(segment[STREAM:START]), segment[START], segment[LENGTH]
                while length:
                    chunk = self._find(key, start)
                    part, first = chunk.part, start - chunk.start
                    size = min(length, len(part.tokens) - first)
                    stop = filled + size
                    tokens[row, filled:stop] = part.tokens[first : first + size]
                    labels[row, filled:stop] = part.labels[first : first + size]
                    for name, values in part.token_fields.items():
                        fields[name][row, filled:stop] = values[first : first + size]
                    for name, objects in part.payloads.items():
                        placed[name] += [
                            (thing, row, filled + a - first, filled + b - first)
                            for thing, a, b in objects
                            if first <= a < first + size
                        ]
                    self._let_go(key, chunk, size)
                    filled, start, length = stop, start + size, length - size
                filled += -segment[LENGTH] % multiple
        # Labels are complete, so nobody asks for the tokens after segments.
        nexts = np.where(
            packs.segments[:, START] + packs.segments[:, LENGTH] == packs.segments[:, TOTAL],
            IGNORED,
            0,
        )
        extras = {name: torch.from_numpy(values) for name, values in fields.items()}
        rows = Rows(tokens=tokens, next_tokens=nexts, labels=labels, multiple=multiple)
        return rows, extras | _lists(placed)


def _lists(placed: dict[str, list[tuple[Any, int, int, int]]]) -> dict[str, Any]:
    """Return each payload field as a list, and where its objects belong, shape (n, 3)."""
    lists: dict[str, Any] = {}
    for name, objects in placed.items():
        lists[name] = [thing for thing, *_ in objects]
        at = np.array([place for _, *place in objects], np.int64).reshape(-1, 3)
        lists[f"{name}_at"] = torch.from_numpy(at)
    return lists


def joined(packs: Sequence[Int64Array]) -> Packs:
    """Return packs, each given as its segment rows, as one value."""
    segments = np.concatenate([no_segments(), *packs])
    return Packs(segments=segments, ends=np.cumsum([len(pack) for pack in packs], dtype=np.int64))
