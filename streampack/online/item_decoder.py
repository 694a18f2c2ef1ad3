"""Items of a source as samples: plain arrays, parsed samples, or errors.

::

    [5, 6, 7], {"tokens": [5, 6]}     plain arrays, whose values are checked when they are packed
    "a text"  --encode-->             the same
    with extra fields                 parsed, or the DataError that refuses it

A sample that is longer than a pack is one segment, or pieces of at most a pack; no payload is cut.

Cost: about 0.1 us per array in a group of arrays, else 1 us, plus the tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from streampack.config import Packing
from streampack.errors import DataError
from streampack.online.plan import FlowPlan
from streampack.pack import fit_samples
from streampack.special_ids import encoded_length, encoded_lengths
from streampack.streams import IterableSample, IterableStream
from streampack.streams.sample_fields import PLAIN_TYPES, Extras
from streampack.texts.source_traits import own_copy
from streampack.texts.tokenization import encode_texts
from streampack.types import LENGTH, NUM_COLUMNS, START, TOTAL, Int64Array, IntArray

TOKENIZER_SWITCH = "TOKENIZERS_PARALLELISM"
NDIM_OF, DTYPE_OF = attrgetter("ndim"), attrgetter("dtype")


Columns: TypeAlias = list[list[Any]]
"""Of some samples: token ids, labels, loss masks, and `Extras`, each None where a sample has none.
Labels and masks are empty lists if no stream of the dataset has them, and so are extras."""


class ItemDecoder:
    """Converts items of stream `number`; without `copies`, its source keeps them as they are."""

    def __init__(self, plan: FlowPlan, number: int, *, copies: bool) -> None:
        self._copies = copies
        self._stream = stream = plan.streams[number]
        self._packing = plan.packing
        self._has_labels, self._has_extras = plan.has_labels, plan.has_extras
        self._skips = stream.most_bad is not None
        self._is_bare = not (stream.has_labels or stream.has_extras)

    def columns(self, tokens: list[Any], *others: list[Any]) -> Columns:
        """Return the columns of samples; those that are missing in `others` have no values."""
        missing: list[list[Any]] = [[None] * len(tokens)] * 3
        labels, masks, extras = [*others, *missing][:3]
        if not self._has_labels:
            labels = masks = []
        return [tokens, labels, masks, extras if self._has_extras else []]

    def own(self, item: Any) -> tuple[Any, int]:
        """Return an item that the source may not change any more, and its tokens or characters.

        It may be an array of token ids or an `IterableSample` already.
        """
        stream, is_text = self._stream, self._stream.tokenizer is not None
        plain = None if is_text else stream.plain(item)
        if plain is not None:
            tokens, labels, mask = plain
            if self._copies:
                tokens, labels, mask = [None if row is None else row.copy() for row in plain]
            return tokens if self._is_bare else IterableSample(tokens, labels, mask), len(tokens)
        row = item
        if isinstance(item, Mapping):
            row = item.get(stream.text if is_text else stream.tokens, item.get("input_ids"))
        size = len(row) if isinstance(row, Sized) else 1
        # Parsing copies what has payloads, and it is read alone.
        return own_copy(item) if self._copies and not stream.payloads.payloads else item, size

    def decode(self, items: Sequence[Any], numbers: Sequence[int]) -> tuple[Int64Array, Columns]:
        """Return the tokens of each item as it is packed, shape (n,), and the columns.

        A bad one has length 0, and a DataError in place of its tokens.
        """
        ids = None if self._stream.tokenizer is None else self._encode(items, numbers)
        values = list(items if ids is None else ids)
        plain: list[list[Any]] = []
        if not self._skips and set(map(type, values)) == {IterableSample}:
            plain = list(map(list, zip(*values, strict=True)))
        elif self._is_bare and not self._skips and are_integer_rows(values):
            plain = [values]
        if plain:
            sizes = np.fromiter(map(len, plain[0]), np.int64, len(values))
            if sizes.all():
                return encoded_lengths(plain[0], sizes, self._packing), self.columns(*plain)
        samples = [
            self._sample(item, number, None if ids is None else ids[index])
            for index, (item, number) in enumerate(zip(items, numbers, strict=False))
        ]
        sizes_of, *columns = map(list, zip(*samples, strict=True))
        return np.array(sizes_of, np.int64), self.columns(*columns)

    def _sample(self, item: Any, number: int, ids: Any) -> tuple[int, Any, Any, Any, Extras | None]:
        """Return a sample's length and columns; 0 and the error if it is bad."""
        for failure in (item, ids):
            if isinstance(failure, DataError):
                return 0, failure, None, None, None
        stream, sample = self._stream, item if isinstance(item, IterableSample) else None
        if sample is None and (ids is None or self._is_bare):
            plain = stream.plain(item if ids is None else ids)
            sample = plain and IterableSample(*plain)
        try:
            if sample is None:
                sample = stream.sample(item, number, ids)
            elif self._skips:
                stream.check_values(number, sample.tokens, sample.labels)
            length, extras = encoded_length(sample.tokens, self._packing), sample.extras
            if extras is not None:
                length += extras.num_slots
                extras = self._placed(extras, sample.tokens, length, stream.where(number))
        except DataError as error:
            return 0, error, None, None, None
        return length, sample.tokens, sample.labels, sample.loss_mask, extras

    def _placed(self, extras: Extras, tokens: Int64Array, length: int, where: str) -> Extras:
        """Return the extras of a sample of `length` tokens, with BOS, EOS and slots of payloads.

        A DataError names one that does not fit a pack and may not be cut, or has a span longer than
        a pack; `where` describes the sample. Such a sample is cut only between spans.
        """
        packing = self._packing
        lead = int(packing.bos_id is not None and tokens[0] != packing.bos_id)
        around = (lead, length - lead - len(tokens))
        payloads = {
            name: [(o, a + lead, b + lead) if b else (o, 0, length) for o, a, b in objects]
            for name, objects in extras.payloads.items()
        }
        spans = [(a, b) for objects in payloads.values() for _, a, b in objects]
        ends: tuple[int, ...] = ()
        if length > packing.max_seq_len and spans and packing.overflow in ("split", "truncate"):
            where = f"{where} of {length} tokens"
            if packing.overflow == "split" and not self._stream.payloads.split:
                raise DataError(
                    f"{where} has payloads, so it is not cut, and does not fit max_seq_len="
                    f"{packing.max_seq_len}; set Payloads(..., split=True) in its stream, overflow "
                    "to truncate or drop, or raise max_seq_len"
                )
            ends = _cuts(length, packing, spans, where)
            if packing.overflow == "truncate":
                ends = ends[:1]
        fields = {name: np.pad(values, around) for name, values in extras.token_fields.items()}
        return replace(extras, token_fields=fields, payloads=payloads, ends=ends)

    def _encode(self, items: Sequence[Any], numbers: Sequence[int]) -> list[IntArray | DataError]:
        """Return the token ids of each text, or the error of one that has none."""
        stream, found = self._stream, list[Any]()
        for item, number in zip(items, numbers, strict=False):
            try:
                text = item if isinstance(item, DataError) else stream.text_of(item, number)
            except DataError as error:
                text = error
            found.append(text)
        places = [place for place, text in enumerate(found) if isinstance(text, str)]
        texts = [found[place] for place in places]
        for place, ids in zip(places, encode_texts(stream.tokenizer, texts), strict=True):
            found[place] = ids
            if isinstance(ids, str):
                where = stream.where(numbers[place])
                found[place] = DataError(f"{where}: {ids}; fix the text or set on_bad_row='skip'")
        return found


def limit_tokenizer_threads(streams: Iterable[IterableStream]) -> None:
    """Keep tokenizers to one thread in this worker, unless the user has decided.

    The workers provide the parallelism: tokenizer threads in each would only compete. The
    tokenizers library knows no other switch than this variable, which it reads from the C
    environment. `os.environ` and the processes that a source starts do not see it.
    """
    has_tokenizer = any(stream.tokenizer is not None for stream in streams)
    if has_tokenizer and TOKENIZER_SWITCH not in os.environ:
        os.putenv(TOKENIZER_SWITCH, "false")


def are_integer_rows(values: Sequence[Any]) -> bool:
    """Return whether all values are one-dimensional arrays of integers.

    >>> are_integer_rows([np.array([1]), np.array([2, 3], np.uint8)]), are_integer_rows([[1]])
    (True, False)
    """
    num = len(values)
    if list(map(type, values)).count(np.ndarray) < num or list(map(NDIM_OF, values)).count(1) < num:
        return False
    dtypes = list(map(DTYPE_OF, values))
    if dtypes.count(dtypes[0]) == num:  # faster than a set
        return dtypes[0].char in PLAIN_TYPES
    return all(dtype.char in PLAIN_TYPES for dtype in set(dtypes))


def _cuts(
    length: int, packing: Packing, spans: list[tuple[int, int]], where: str
) -> tuple[int, ...]:
    """Return the ends of pieces that each fit a pack; no span is cut."""
    size, multiple = packing.max_seq_len, packing.pad_to_multiple or 1
    ends: list[int] = []
    start = 0
    while start < length:
        end = min(start + size, length)
        # Spans may overlap, so a cut moved out of one span may fall into another.
        while cut := [a for a, b in spans if a < end < b]:
            # Only a sample's last piece may need padding, so the others end at a multiple.
            end = start + (min(cut) - start) // multiple * multiple
        if end <= start:
            longest = max(b - a for a, b in spans)
            raise DataError(
                f"{where} has a payload of up to {longest} tokens, which no pack of "
                f"max_seq_len={size} can take uncut if pieces end at multiples of {multiple}; "
                "raise max_seq_len"
            )
        ends.append(end)
        start = end
    return tuple(ends)


def segments_of(
    rows: Int64Array, extras: Sequence[Extras | None], packing: Packing, names: Sequence[str]
) -> Int64Array:
    """Return the segments of sample rows, shape (n, 4), in order, shape (m, 6)."""
    size, overflow = packing.max_seq_len, packing.overflow
    if not any(each is not None and each.ends for each in extras):
        return fit_samples(rows, size, overflow, names)
    parts = []
    for index, each in enumerate(extras):
        part = fit_samples(rows[index : index + 1], size, overflow, names)
        if each is not None and each.ends:
            part = np.empty((len(each.ends), NUM_COLUMNS), np.int64)
            part[:, :START] = rows[index, :START]
            part[:, START] = (0, *each.ends[:-1])
            part[:, LENGTH] = each.ends - part[:, START]
            part[:, TOTAL] = each.ends[-1]
        parts.append(part)
    return np.concatenate(parts)
