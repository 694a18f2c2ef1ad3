"""Items of a source as samples: arrays that need no closer look, parsed samples, or errors.

::

    [5, 6, 7], {"tokens": [5, 6]}     plain arrays, whose values are checked later
    "a text"  --encode-->             the same
    longer than a pack, with fields   ComplexSample: parsed, or the DataError that refuses it

Cost: about 0.1 us per sample of a list of arrays, else 1 us, plus the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from streampack.config import Packing
from streampack.errors import DataError
from streampack.online.ready_samples import ComplexSample, ReadySamples
from streampack.online.source_slice import Items
from streampack.special_ids import adds_ids, encoded_length, encoded_lengths
from streampack.streams import IterableSample, IterableStream
from streampack.streams.iterable_stream import Plain
from streampack.streams.sample_fields import PLAIN_TYPES, invalid_labels, invalid_token_ids
from streampack.streams.tokenization import encode_texts
from streampack.types import Int64Array

NUM_ADDED = 2  # tokens that may be added to a sample: BOS and EOS
NDIM_OF, DTYPE_OF = attrgetter("ndim"), attrgetter("dtype")


class ItemDecoder:
    """Converts items of one stream.

    With `is_kept`, the source keeps its items as they are: they need no copy, and can be parsed
    later.
    """

    def __init__(self, stream: IterableStream, packing: Packing, *, is_kept: bool) -> None:
        self._stream = stream
        self._packing = packing
        self._adds_ids = adds_ids(packing)
        self._longest = packing.max_seq_len - NUM_ADDED
        self._is_kept = is_kept
        self._skips = stream.on_bad_sample == "skip"
        self._is_bare = not (stream.has_labels or stream.has_extras)
        self._takes_arrays = self._is_bare and not self._skips

    def decode(self, items: Items, ready: ReadySamples) -> None:
        """Append items to the samples that are ready."""
        values = items.values
        # An array of integers, as most samples are, needs no call; many need one for all.
        if self._takes_arrays and len(values) == 1:
            value = values[0]
            if (
                type(value) is np.ndarray
                and value.ndim == 1
                and 0 < (length := len(value)) <= self._longest
                and value.dtype.char in PLAIN_TYPES
            ):
                if self._adds_ids:
                    length = encoded_length(value, self._packing)
                line = (items.pass_, items.numbers[0], items.taken, length)
                ready.append(line, (value if self._is_kept else value.copy(), None, None))
                return
        if self._takes_arrays and self._is_kept and are_integer_rows(values):
            sizes = np.fromiter(map(len, values), np.int64, len(values))
            if sizes.all():
                lengths = encoded_lengths(values, sizes, self._packing)
                ready.extend(items, np.where(sizes <= self._longest, lengths, 0))
                return
        self.decode_each(items, values, ready)

    def decode_each(self, items: Items, values: Sequence[Any], ready: ReadySamples) -> None:
        """Append items one by one; `values` are theirs, or token ids of their texts, or errors."""
        stream, are_encoded = self._stream, values is not items.values
        may_be_plain = self._is_bare or stream.tokenizer is None
        for index, value in enumerate(values):
            number = items.numbers[index]
            plain = stream.plain(value) if may_be_plain else None
            if plain is not None and (
                len(plain[0]) > self._longest or (self._skips and has_invalid_values(plain))
            ):
                plain = None
            if plain is not None:
                if not self._is_kept and not are_encoded:
                    tokens, labels, mask = plain
                    plain = (tokens.copy(), _copy(labels), _copy(mask))
                length = len(plain[0])
                if self._adds_ids:
                    length = encoded_length(plain[0], self._packing)
                ready.append((items.pass_, number, items.taken + index, length), plain)
                continue
            more = ComplexSample(items.values[index])
            if not self._is_kept:
                ids = value if are_encoded else None
                more = ComplexSample(None, self.parse(items.values[index], number, ids))
            ready.append((items.pass_, number, items.taken + index, 0), (more, None, None))

    def parse(
        self, item: Any, number: int, ids: Int64Array | DataError | None = None
    ) -> IterableSample | DataError:
        """Return an item as a sample, or the error that refuses it."""
        for failure in (item, ids):
            if isinstance(failure, DataError):
                return failure
        try:
            return self._stream.sample(item, number, ids)  # type: ignore[arg-type]
        except DataError as error:
            return error

    def text(self, item: Any, number: int) -> str | DataError:
        """Return an item's text, or its error."""
        if isinstance(item, DataError):
            return item
        try:
            return self._stream.text_of(item, number)
        except DataError as error:
            return error

    def encode(self, items: Sequence[tuple[Any, int]]) -> list[Int64Array | DataError]:
        """Return the token ids of items, given with their numbers, or the errors."""
        texts = [self.text(item, number) for item, number in items]
        good = [text for text in texts if isinstance(text, str)]
        try:
            ids = iter(encode_texts(self._stream.tokenizer, good))
        except Exception:  # encoding them one by one finds the text that fails
            return [
                self._encode_alone(text, number) if isinstance(text, str) else text
                for text, (_, number) in zip(texts, items, strict=True)
            ]
        return [next(ids) if isinstance(text, str) else text for text in texts]

    def _encode_alone(self, text: str, number: int) -> Int64Array | DataError:
        try:
            return encode_texts(self._stream.tokenizer, [text])[0]
        except Exception as error:
            return DataError(
                f"{self._stream.where(number)}: the tokenizer raised {type(error).__name__}: "
                f"{error}; fix the text or set on_bad_sample='skip'"
            )


def _copy(row: Any) -> Any:
    return None if row is None else row.copy()


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


def has_invalid_values(plain: Plain) -> bool:
    """Whether a sample holds an invalid token id or label."""
    tokens, labels, _ = plain
    return bool(
        len(invalid_token_ids(tokens)) or (labels is not None and len(invalid_labels(labels)))
    )
