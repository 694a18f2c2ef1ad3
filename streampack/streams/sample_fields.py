"""The fields of one item of an iterable: found, converted to arrays, and checked.

Each function takes the item as a dict and `where`, its description for messages. It raises a
DataError that names the field and what to write instead.

Cost: `plain_row` and `is_mask` take one pass over the values, the rest about 1 us per field.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack._checks import MAX_ID
from streampack.errors import DataError
from streampack.texts.source_traits import own_copy
from streampack.types import Int64Array

MAX_INT64 = 2**63 - 1
PLAIN_TYPES = "?bBhHiIlq"  # integer types that convert losslessly to int64
ENCODE_CHATS = (
    "encode conversations with their template: IterableStream(ChatSamples(rows, "
    "ChatEncoder(tokenizer)), loss_mask='loss_mask'), both from streampack.texts"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """The extra fields of a sample, or of a segment of one."""

    token_fields: dict[str, Any]
    """Arrays with one value per token."""
    payloads: dict[str, list[tuple[Any, int, int]]]
    """Objects, each with its span: first token, and one past the last, 0 of the whole sample."""
    num_slots: int = 0
    """Token slots that the payloads take behind the sample's own tokens."""
    ends: tuple[int, ...] = ()
    """Where the pieces of a sample end that is longer than a pack and has payloads."""

    @property
    def hashed(self) -> int:
        """A hash of token fields and of the spans of payloads."""
        values = [row for row in self.token_fields.values() if not row.dtype.hasobject]
        values += [np.array([(a, b) for _, a, b in own]) for own in self.payloads.values()]
        mixed = 0
        for row in values:
            mixed = zlib.crc32(row.tobytes(), mixed)
        return mixed

    def slice(self, start: int, stop: int) -> Extras:
        """Return the extras of tokens [start, stop), a payload with its first token."""
        return Extras(
            token_fields={k: v[start:stop].copy() for k, v in self.token_fields.items()},
            payloads={
                name: [(o, a - start, b - start) for o, a, b in objects if start <= a < stop]
                for name, objects in self.payloads.items()
            },
        )

    def take(self, start: int, stop: int) -> Extras:
        """Return the extras of tokens [start, stop); their payloads leave this sample."""
        taken = self.slice(start, stop)
        for name, objects in self.payloads.items():
            self.payloads[name] = [each for each in objects if not start <= each[1] < stop]
        return taken


def token_ids(item: Mapping[str, Any], name: str, where: str) -> Int64Array:
    """Return the token ids of an item, from field `name`; "tokens" may be "input_ids"."""
    if name == "tokens" and name not in item and "input_ids" in item:
        name = "input_ids"
    if name not in item:
        raise _missing(item, name, where, _way_to_tokens(item))
    if isinstance(item[name], str):
        raise DataError(f"{where}: field {name!r} is text, but must be integers; set tokenizer=")
    return _integers(item, name, where)


def _way_to_tokens(item: Mapping[str, Any]) -> str:
    if is_chat(item):
        return ENCODE_CHATS
    rows = [name for name, value in item.items() if plain_row(value) is not None]
    texts = [name for name, value in item.items() if isinstance(value, str)]
    if rows:
        return f"set tokens= to the field that has them: {' or '.join(map(repr, rows))}"
    if texts:
        name = "text" if "text" in texts else texts[0]
        return f"set tokenizer={'' if name == 'text' else f' and text={name!r}'}"
    return "give token ids, or texts and tokenizer="


def is_chat(item: Any) -> bool:
    """Return whether an item is a conversation: messages, or a dict that contains them."""
    values = item.values() if isinstance(item, Mapping) else (item,)
    return any(
        isinstance(value, list | tuple | np.ndarray)
        and len(value) > 0
        and isinstance(value[0], Mapping)
        for value in values
    )


def invalid_token_ids(tokens: Any) -> Any:
    """Return the values of a row that are not valid token ids.

    >>> invalid_token_ids(np.array([7, -1, 2**40])).tolist()
    [-1, 1099511627776]
    """
    return tokens[(tokens < 0) | (tokens > MAX_ID)]


def invalid_labels(labels: Any) -> Any:
    """Return the values of a row that are outside int32.

    >>> invalid_labels(np.array([7, -100, 2**40])).tolist()
    [1099511627776]
    """
    return labels[(labels < -MAX_ID) | (labels > MAX_ID)]


def plain_row(value: Any) -> Any:
    """Return a row of integers that numpy can copy directly; None if it needs a closer look."""
    if type(value) is np.ndarray:
        return value if value.ndim == 1 and value.dtype.char in PLAIN_TYPES else None
    if type(value) is not list:
        return None
    try:
        # Rejects non-integers in half the time that numpy's type inference takes.
        return np.frombuffer(struct.pack(f"{len(value)}q", *value), np.int64)
    except (TypeError, struct.error):
        return None


def is_mask(values: Any) -> bool:
    """Return whether all values are 0 or 1."""
    return not (values >> 1).any()  # one pass; works for bools too


def values_per_token(
    tokens: Int64Array, item: Mapping[str, Any], name: str, where: str
) -> Int64Array:
    """Return the integers of a field, one for each token."""
    values = _integers(item, name, where)
    _check_length(len(values), len(tokens), name, where)
    return values


def _check_length(num_values: int, num_tokens: int, name: str, where: str) -> None:
    if num_values != num_tokens:
        raise DataError(
            f"{where}: {num_tokens} tokens, but {num_values} values in {name!r}; "
            "give one for each token"
        )


def _integers(item: Mapping[str, Any], name: str, where: str, *, is_row: bool = True) -> Int64Array:
    if name not in item:
        way_out = "set labels=, loss_mask= or payloads= to fields it has"
        raise _missing(item, name, where, way_out)
    try:
        values = np.asarray(item[name])
    except ValueError as error:  # rows of unequal length
        raise DataError(f"{where}: field {name!r} is not a row of integers: {error}") from error
    if values.size and values.dtype.kind not in "iub":
        raise DataError(
            f"{where}: field {name!r} has type {values.dtype}, but must have integers; "
            "tokenize first"
        )
    if is_row and values.size and max(values.shape, default=1) != values.size:
        shape = " x ".join(map(str, values.shape))
        raise DataError(
            f"{where}: field {name!r} has {shape} values, but a sample is one row; give each "
            "row as a sample of its own"
        )
    if values.dtype == np.uint64 and values.size and values.max() > MAX_INT64:
        raise DataError(
            f"{where}: field {name!r} has the value {values.max()}, but integers are at most "
            f"{MAX_INT64}; write negative values with a signed type"
        )
    return values.reshape(-1).astype(np.int64)


def _missing(item: Mapping[str, Any], name: str, where: str, way_out: str) -> DataError:
    return DataError(f"{where}: no field {name!r}; it has {', '.join(map(repr, item))}; {way_out}")


def cast_values(
    item: Mapping[str, Any], name: str, dtype: np.dtype[Any], num_tokens: int, where: str
) -> Any:
    """Return a field with one value per token as an array of `dtype`."""
    if name not in item:
        raise _missing(item, name, where, "set token_fields= to those it has")
    try:
        given = np.asarray(item[name]).reshape(-1)
        # When a conversion overflows, numpy warns or says nothing; it is refused below.
        with np.errstate(over="ignore", invalid="ignore"):
            values = given.astype(dtype)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: field {name!r} cannot be converted to {dtype}: {error}"
        ) from error
    _check_length(len(values), num_tokens, name, where)
    if given.dtype.kind in "biuf" and not np.can_cast(given.dtype, dtype):
        # To floats, only the range is checked: they round.
        is_rounded = dtype.kind in "fc"
        wrong = np.isinf(values) & ~np.isinf(given) if is_rounded else values != given
        if wrong.any():
            raise DataError(
                f"{where}: field {name!r} has the value {given[wrong][0]}, which does not fit "
                f"in {dtype}; set token_fields= to a dtype in which it does"
            )
    return values


def payloads_of(
    item: Mapping[str, Any], name: str, span_field: str | None, num_tokens: int, where: str
) -> list[tuple[Any, int, int]]:
    """Return copies of the payloads in a field (none, one, or a list), each with its span."""
    value = own_copy(item.get(name))
    things = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if span_field is None or not things:
        return [(thing, 0, 0) for thing in things]
    flat = _integers(item, span_field, where, is_row=False)
    spans = flat[: len(flat) // 2 * 2].reshape(-1, 2)
    if len(flat) % 2 or len(spans) != len(things):
        raise DataError(
            f"{where}: {len(things)} payloads, but {len(spans)} spans in {span_field!r}; give each "
            "payload one"
        )
    bad = spans[(spans[:, 0] < 0) | (spans[:, 0] >= spans[:, 1]) | (spans[:, 1] > num_tokens)]
    if len(bad):
        raise DataError(
            f"{where}: {span_field!r} has a span {bad[0].tolist()}, which is not inside its "
            f"{num_tokens} tokens; a span is its first token and one past its last"
        )
    return [(thing, *span) for thing, span in zip(things, spans.tolist(), strict=True)]
