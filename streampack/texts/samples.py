"""Columns of samples, which the first one decides on, and the samples that fit them.

::

    {"tokens": [5, 6], "loss_mask": [0, 1], "url": "a"}  -->  tokens     ndarray:uint16
                                                              loss_mask  ndarray:int32
                                                              url        str

A list of one integer per token (a loss mask, labels) becomes an array. Everything without a type of
its own in MDS is stored as JSON.

Cost: about 5 us a sample, for the checks of its token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.mds.columns import DTYPES
from streampack.mds.length_file import NO_TOKEN
from streampack.padding import PADDING_MASK, padded_range
from streampack.types import IntArray

TYPES_OF_IDS = ("uint16", "int32", "uint32")  # suggested if the chosen dtype is too small
TARGETS = {"labels", "loss_mask"}  # names used by the docs and by ChatEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSchema:
    """Columns and types that all samples of a stream have."""

    column: str
    """Name of the token column."""
    dtype: str
    """Type of the stored tokens."""
    columns: Mapping[str, str]
    """MDS encoding of each column, the token column included."""
    per_token: tuple[str, ...] = ()
    """Columns with one integer per token."""

    @classmethod
    def of(cls, row: Mapping[str, Any], column: str, dtype: str) -> SampleSchema:
        """Return the schema that a first sample decides on; a ValueError refuses its token ids.

        >>> row = {"tokens": [5, 6], "mask": [0, 1], "url": "a"}
        >>> SampleSchema.of(row, "tokens", "uint16").columns
        {'tokens': 'ndarray:uint16', 'mask': 'ndarray:int32', 'url': 'str'}
        """
        tokens = checked_tokens(row[column], np.dtype(dtype))
        values = {**row, column: tokens}
        lists = tuple(name for name in values if is_per_token(values[name], len(tokens)))
        encodings = {name: _encoding_of(value) for name, value in values.items()}
        encodings |= dict.fromkeys(lists, f"ndarray:{list_dtype(dtype)}")
        return cls(column=column, dtype=dtype, columns=encodings, per_token=lists)

    def fit(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a sample with its token ids and lists as arrays, or None if it has no tokens.

        Padding by an `attention_mask` is omitted.

        A ValueError says that it has other fields, or values that do not fit.

        >>> schema = SampleSchema(column="t", dtype="uint16", columns={"t": "ndarray:uint16"})
        >>> schema.fit({"t": [1, 2]}), schema.fit({"t": []})
        ({'t': array([1, 2], dtype=uint16)}, None)
        """
        if self.column not in row:
            raise ValueError(
                f"no {self.column!r}; it has {', '.join(map(repr, row))}; "
                "set tokens= to one of them"
            )
        tokens = checked_tokens(row[self.column], np.dtype(self.dtype))
        num = len(tokens)
        if (kept := padded_range(row.get(PADDING_MASK), num)) is not None:
            arrays = {k: v for k, v in row.items() if getattr(v, "shape", None) == (num,)}
            arrays |= {k: v for k, v in row.items() if is_per_token(v, num)}
            row = {**row, **{name: value[kept] for name, value in arrays.items()}}
            tokens = tokens[kept]
        if len(tokens) == 0:
            return None
        if row.keys() != self.columns.keys():
            # The encoder would silently drop a field without a column.
            raise ValueError(
                f"has {', '.join(map(repr, row))}, but the first sample has "
                f"{', '.join(map(repr, self.columns))}; give all samples the same fields"
            )
        fitted = {**row, self.column: tokens}
        if self.per_token:
            like = np.empty(len(tokens), list_dtype(self.dtype))
            for name in self.per_token:
                fitted[name] = _as_integers(row[name], name, like)
        for name in TARGETS & row.keys():
            value = fitted[name]
            is_row = isinstance(value, np.ndarray) and value.shape == tokens.shape
            is_row = is_row and value.dtype.name in DTYPES
            if not is_row and isinstance(value, (np.ndarray, list, tuple)):
                raise ValueError(
                    f"{name!r} is {repr(value)[:60]}, but must have one integer for each of the "
                    f"{len(tokens)} tokens; change it, or give it another name"
                )
        return fitted


def checked_tokens(values: Any, dtype: np.dtype[Any]) -> IntArray:
    """Return token ids as an array of a type, shape (num_tokens,); a ValueError refuses others."""
    tokens: npt.NDArray[Any] = np.asarray(values)
    if tokens.size == 0:
        return np.zeros(0, dtype)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"is {tokens.dtype} of shape {tokens.shape}, but must be one row "
            "of integer token ids; tokenize it first"
        )
    least, most = int(tokens.min()), int(tokens.max())
    limits = np.iinfo(dtype)
    if least < 0 or most >= NO_TOKEN:
        raise ValueError(
            f"token id {least if least < 0 else most}, but ids must be 0 to "
            f"{NO_TOKEN - 1}; write labels and masks in columns of their own"
        )
    if most > limits.max:
        fitting = next(name for name in TYPES_OF_IDS if most <= np.iinfo(name).max)
        raise ValueError(
            f"token ids {least} to {most} do not fit {dtype} "
            f"(0 to {limits.max}); set tokens_dtype={fitting!r}"
        )
    return tokens.astype(dtype, copy=False)


def list_dtype(dtype: str) -> str:
    """Return the type of integers per token: labels are token ids or -100."""
    return np.promote_types(dtype, np.int32).name


def is_per_token(value: Any, num_tokens: int) -> bool:
    """Return whether a field must be converted to an array of integers for MDS."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype == np.bool_ and value.shape == (num_tokens,))
    is_list = isinstance(value, (list, tuple)) and len(value) == num_tokens
    return is_list and all(isinstance(item, (int, np.integer, np.bool_)) for item in value)


def _as_integers(values: Any, name: str, like: IntArray) -> IntArray:
    limits = np.iinfo(like.dtype)
    with suppress(ValueError):  # raised for lists of unequal lengths
        array: npt.NDArray[Any] = np.asarray(values)
        is_fit = array.dtype.kind in "biu" and array.shape == like.shape
        if is_fit and limits.min <= array.min() and array.max() <= limits.max:
            return array.astype(like.dtype)
    raise ValueError(
        f"{name!r} is {repr(values)[:60]}, but as in the first sample it must "
        f"have one integer of {limits.min} to {limits.max} for each of the {len(like)} tokens; "
        "fix it, or put it into a dict in all samples if it has another meaning"
    )


def _encoding_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"ndarray:{value.dtype.name}"
    for kind, encoding in ((str, "str"), (bytes, "bytes"), (int, "int")):
        if isinstance(value, kind) and not isinstance(value, bool):
            return encoding
    return "json"
