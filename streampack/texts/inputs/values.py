"""Conversion of column values to texts, token ids and conversations.

A missing column and a value of another type are a BadValueError. For a value, its text completes
"column 'x' ...".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from streampack.errors import suggest
from streampack.mds.columns import token_names
from streampack.padding import PADDING_MASK, is_padded, padded_range
from streampack.texts.chat_rows import FORMATS, LISTS, PAIRS, PREFERENCES, columns_of
from streampack.types import IntArray

KEPT = "columns=, labels= or loss_mask"  # the options that name columns to keep


class BadValueError(Exception):
    """A value that cannot be used."""


def to_text(value: Any) -> str:
    """Return a text, which may be given as bytes of UTF-8."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadValueError(f"is not valid UTF-8 at its byte {error.start}") from error
    if isinstance(value, (list, np.ndarray)):
        raise BadValueError(
            f"is a list of {len(value)}, but must be text; omit tokenizer= if it has "
            "token ids, or name it with chat= if it is a conversation"
        )
    kind = "null" if value is None else f"of type {type(value).__name__}"
    raise BadValueError(f"is {kind}, but must be text; name another column with text=")


def to_tokens(value: Any) -> IntArray:
    """Return a list of token ids, or JSON text of one, as an array of shape (num_tokens,).

    >>> to_tokens([5, 6]).tolist(), to_tokens("[7]").tolist()
    ([5, 6], [7])
    """
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            raise BadValueError("is text, but must be a list of token ids; set tokenizer= for text")
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise BadValueError(f"is text, but not JSON ({error})") from error
    if isinstance(value, (list, np.ndarray)):
        if not len(value):
            return np.zeros(0, np.int64)
        try:
            tokens: npt.NDArray[Any] = np.asarray(value)
        except (ValueError, OverflowError):  # lists of unequal lengths
            tokens = np.zeros((0, 0))
        if tokens.ndim == 1 and tokens.dtype.kind in "iub":
            return tokens.astype(np.int64) if tokens.dtype.kind == "b" else tokens
    raise BadValueError(
        f"is {repr(value)[:60]}, but must be a list of integers; set tokenizer= for text"
    )


CONVERSIONS: dict[str, Callable[[Any], Any]] = {"text": to_text, "tokens": to_tokens}


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The columns that are taken from each row: one of the value, and the kept ones.

    A text file is one row without columns.
    """

    option: str
    """What the value is, as the option that names it: "text", "tokens" or "chat"; or "row" for all
    columns of the row, as a dict."""
    name: str
    """Column of the value. Tokens in "tokens" are also found in "input_ids"; a row of JSON lines
    may be the list itself. Without that of a chat, any layout that a `ChatEncoder` reads is. Empty
    for a whole row, whatever it is taken for."""
    keep: tuple[str, ...] = ()
    """Columns that are kept next to the tokens."""

    def column_in(self, names: Iterable[str]) -> str:
        """Return the name of the column; "input_ids" where "tokens" is missing."""
        known = list(names)
        for name in token_names(self.name) if self.option == "tokens" else (self.name,):
            if name in known:
                return name
        raise BadValueError(no_column(self.name, known, self.option))

    def value_in(self, row: Mapping[str, Any]) -> Any:
        """Return the value of a row; for conversations a row that `read_row` reads."""
        if self.option == "chat":
            return self._chat_in(row)
        if self.option == "row":
            return dict(row)
        name = self.column_in(row)
        try:
            value = CONVERSIONS[self.option](row[name])
        except BadValueError as error:
            raise BadValueError(f"column {name!r} {error}") from error
        if self.may_pad(row):
            self._check_padding(row[PADDING_MASK], len(value))
        return value

    @property
    def checks_padding(self) -> bool:
        """Whether a row that has an attention mask is refused if that marks padding."""
        return self.option == "tokens" and PADDING_MASK not in self.keep

    def may_pad(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row may have to be refused for its padding."""
        return self.checks_padding and is_padded(row.get(PADDING_MASK))

    def _check_padding(self, mask: Any, num_tokens: int) -> None:
        try:
            kept = padded_range(mask, num_tokens)
        except ValueError as error:
            raise BadValueError(str(error)) from error
        if kept is not None:
            raise BadValueError(
                f"its {PADDING_MASK!r} marks padding, which would be learned; tokenize without "
                f"padding, or keep this column, and padding is omitted: loss_mask={PADDING_MASK!r} "
                f"of TokenFiles, or --columns {PADDING_MASK} of streampack write"
            )

    def _chat_in(self, row: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: row[name] for name in self._chat_columns(row)}
        if self.name in row:
            named = {} if self.name in PAIRS else {LISTS[0]: fields.pop(self.name)}
            fields = {name: value for name, value in fields.items() if name not in LISTS} | named
        return fields

    def _chat_columns(self, names: Iterable[str]) -> list[str]:
        known = list(names)
        # The reader of rows refuses preferences, with a way out.
        are_found = any(name in known for name in (self.name, *LISTS, *PREFERENCES))
        if not are_found and not any({*pair} <= {*known} for pair in PAIRS.items()):
            reason = no_column(self.name, known, self.option)
            raise BadValueError(f"{reason}, or name the fields {FORMATS}")
        return columns_of(known, self.name)

    def columns_in(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read, that of the value first; refuse one that is there twice."""
        if self.option == "row":
            columns = list(names)
        else:
            is_chat = self.option == "chat"
            columns = self._chat_columns(names) if is_chat else [self.column_in(names)]
            columns += self.keep
            self.kept_in(dict.fromkeys(names))
        columns = list(dict.fromkeys(columns))
        if len(set(names)) < len(names):
            for name in columns:
                if (times := names.count(name)) > 1:
                    raise BadValueError(f"has {times} columns {name!r}; rename all but one of them")
        return columns

    def kept_in(self, row: Mapping[str, Any]) -> list[Any]:
        missing = next((name for name in self.keep if name not in row), None)
        if missing is not None:
            raise BadValueError(no_column(missing, list(row), KEPT))
        return [row[name] for name in self.keep]


def no_column(name: str, known: Sequence[str], option: str) -> str:
    """Return the reason of a row that lacks a column."""
    has = ", ".join(map(repr, known)) or "none"
    way_out = f"set {option}= to one of them"
    marks = [mark for mark in ";\t|" if len(known) == 1 and mark in known[0]]
    if marks:  # of a table whose columns are separated otherwise
        return (
            f"no column {name!r}; its only column is {has}, which seems to be several, separated "
            f"by {marks[0]!r}; write the file again with commas, or as .tsv with tabs"
        )
    if option == "tokens":
        way_out += "; for text, set tokenizer= and text="
    return f"no column {name!r}; it has {has}{suggest(name, known)}; {way_out}"
