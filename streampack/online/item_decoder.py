"""Items of a source as samples: arrays that need no closer look, parsed samples, or errors.

::

    [5, 6, 7], {"tokens": [5, 6]}     plain arrays, whose values are checked later
    "a text"  --encode-->             the same
    longer than a pack, with fields   IterableSample, or the DataError that refuses it

Cost: about 1 us per sample, plus the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.errors import DataError
from streampack.online.source_slice import Items
from streampack.streams import IterableSample, IterableStream
from streampack.streams.iterable_stream import Plain
from streampack.streams.sample_fields import (
    PLAIN_TYPES,
    invalid_labels,
    invalid_token_ids,
)
from streampack.streams.tokenization import encode_texts
from streampack.types import Int64Array


@dataclass(slots=True, eq=False)
class DrawnSample:
    """A sample of a stream. Not frozen, because creation is on the hot path."""

    pass_: int
    taken: int
    """Items of the worker's slice before it in that pass."""
    number: int
    plain: Plain | None
    """Its arrays, if it fits a pack and only token ids and labels remain to be checked."""
    item: Any = None
    """Otherwise its item, or the error of reading it."""
    sample: IterableSample | DataError | None = None
    """The parsed item, or the error; None: not parsed yet."""

    @property
    def num_tokens(self) -> int:
        """Its own tokens, without BOS and EOS; 0 if it is not parsed or bad."""
        if self.plain is not None:
            return len(self.plain[0])
        return len(self.sample.tokens) if isinstance(self.sample, IterableSample) else 0


class ItemDecoder:
    """Converts items of one stream.

    Args:
        stream: The stream, which describes its items.
        longest: Most tokens of a plain sample.
        is_kept: Whether the source keeps its items as they are, so that they need no copy and can
            be parsed later.
    """

    def __init__(self, stream: IterableStream, longest: int, *, is_kept: bool) -> None:
        self._stream = stream
        self._longest = longest
        self._is_kept = is_kept
        self._skips = stream.on_bad_sample == "skip"
        has_extras = stream.length_fn or stream.token_fields or stream.payloads
        self._is_bare = not (stream.has_labels or has_extras)

    def decode_one(self, items: Items) -> DrawnSample:
        """Return a single item as a sample."""
        value = items.values[0]
        # An array of integers, as most samples are, needs no call.
        if (
            self._is_bare
            and not self._skips
            and type(value) is np.ndarray
            and value.ndim == 1
            and 0 < len(value) <= self._longest
            and value.dtype.char in PLAIN_TYPES
        ):
            tokens = value if self._is_kept else value.copy()
            plain = (tokens, None, None)
            return DrawnSample(items.pass_, items.taken, items.numbers[0], plain)
        return self.decode(items)[0]

    def decode(self, items: Items, encoded: Sequence[Any] | None = None) -> list[DrawnSample]:
        """Return items as samples.

        Args:
            items: The items.
            encoded: Token ids of their texts, or errors, if the stream has a tokenizer.
        """
        samples, stream = [], self._stream
        may_be_plain = self._is_bare or stream.tokenizer is None
        values = items.values if encoded is None else encoded
        for index, value in enumerate(values):
            number, item, sample = items.numbers[index], items.values[index], None
            plain: Plain | None
            if self._is_bare and type(value) is np.ndarray and value.ndim == 1 and len(value):
                plain = (value, None, None) if value.dtype.char in PLAIN_TYPES else None
            else:
                plain = stream.plain(value) if may_be_plain else None
            if plain is not None and (
                len(plain[0]) > self._longest or (self._skips and has_invalid_values(plain))
            ):
                plain = None
            if plain is not None:
                item = None
                if not self._is_kept and encoded is None:
                    tokens, labels, mask = plain
                    plain = tokens.copy(), _copy(labels), _copy(mask)
            elif not self._is_kept:
                sample = self.parse(item, number, None if encoded is None else value)
                item = None
            taken = items.taken + index
            samples.append(DrawnSample(items.pass_, taken, number, plain, item, sample))
        return samples

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
            ids: Iterator[Int64Array | DataError] = iter(encode_texts(self._stream.tokenizer, good))
        except Exception:  # encoding them one by one finds the text that fails
            ids = (
                self._encode_alone(text, number)
                for text, (_, number) in zip(texts, items, strict=True)
                if isinstance(text, str)
            )
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


def has_invalid_values(plain: Plain) -> bool:
    """Whether a sample holds an invalid token id or label."""
    tokens, labels, _ = plain
    return bool(
        len(invalid_token_ids(tokens)) or (labels is not None and len(invalid_labels(labels)))
    )
