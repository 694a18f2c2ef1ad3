"""The columns of a stream that are read: chosen by options, checked against index.json."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from streampack.errors import ConfigError, DataError, suggest
from streampack.mds.columns import DTYPES, Column, find_column, token_names
from streampack.mds.index import Layout, MdsIndex
from streampack.streams.label_columns import TARGET_COLUMNS, warn_unused_label_column

FoundColumns: TypeAlias = dict[Layout, dict[str, Column]]
"""The columns that are read of shards of each layout, by what they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSelection:
    """The columns of a stream that are read, and the types of those stored as `bytes`; hashable."""

    tokens: str = "tokens"
    tokens_dtype: str | None = None
    labels: str | None = None
    labels_dtype: str | None = None
    labels_shifted: bool | None = None
    loss_mask: str | None = None
    loss_mask_dtype: str | None = None

    @classmethod
    def of(cls, source: Any) -> ColumnSelection:
        """Read the selection from a source, where a column's type is written with its name.

        Raises:
            ConfigError: If a type is unknown.
        """
        chosen: dict[str, Any] = {"labels_shifted": source.labels_shifted}
        for option in ("tokens", "labels", "loss_mask"):
            if (column := getattr(source, option)) is not None:
                chosen[option], chosen[f"{option}_dtype"] = split_type(column, option)
        return cls(**chosen)

    def find(self, layout: Layout, where: str) -> dict[str, Column]:
        """Return the columns of "tokens", and of "labels" and "loss_mask" if they are read."""
        columns = {}
        for option in ("tokens", "labels", "loss_mask"):
            name = getattr(self, option)
            if name is not None:
                names = token_names(self.tokens) if option == "tokens" else (name,)
                dtype = getattr(self, f"{option}_dtype") or self.tokens_dtype
                columns[option] = find_column(layout, names, dtype, where, option)
        return columns


def split_type(column: str, option: str) -> tuple[str, str | None]:
    """Return the name of a column, and the type that is written with it.

    >>> split_type("ids:uint16", "tokens"), split_type("ids", "tokens")
    (('ids', 'uint16'), ('ids', None))
    """
    name, _, dtype = column.rpartition(":")
    if name and dtype not in DTYPES:
        raise ConfigError(
            f"{option}={column!r}: the type {dtype!r} of its values is not one of "
            f"{'|'.join(DTYPES)}{suggest(dtype, DTYPES)}",
            option=option,
        )
    return name or column, dtype if name else None


def find_columns(index: MdsIndex, columns: ColumnSelection, name: str) -> tuple[FoundColumns, str]:
    """Find the columns of each layout before any shard is opened; also the token column's name.

    Raises:
        DataError: If one is missing or of another type, or tokens are in columns of two names.
    """
    found: FoundColumns = {}
    for number, shard in enumerate(index.shards):
        if shard.layout not in found:
            where = f"stream {name!r} ({index.uri}: shards.{number})"
            found[shard.layout] = columns.find(shard.layout, where)
    token_columns = {own["tokens"].name for own in found.values()}
    if len(token_columns) > 1:
        raise DataError(
            f"stream {name!r}: its shards hold tokens in columns "
            f"{' and '.join(map(repr, sorted(token_columns)))}; rewrite the stream with one "
            "of them"
        )
    return found, token_columns.pop()


def warn_unused_columns(
    found: FoundColumns, columns: ColumnSelection, name: str, tokens: str
) -> None:
    """Warn about label and loss mask columns, if the selection reads neither kind."""
    if columns.labels or columns.loss_mask:
        return
    encodings = dict(chain(*(zip(one.names, one.encodings, strict=True) for one in found)))
    for column in TARGET_COLUMNS:
        # With another encoding the column is something else, such as a class label.
        kind = encodings.get(column, "").partition(":")[0]
        if column != tokens and kind in ("ndarray", "bytes"):
            warn_unused_label_column("Stream", name, column)
