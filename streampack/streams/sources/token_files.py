"""`TokenFiles`: token ids that other programs wrote, or rows of token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streampack._checks import check_choice, check_names
from streampack.config.download import Download
from streampack.config.moved import with_known_options
from streampack.errors import ConfigError, short_text
from streampack.flat.token_file import TokenFormat
from streampack.mds.columns import DTYPES
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.flat_opening import open_flat
from streampack.streams.sources.values import check_source, is_paths, names_rows
from streampack.streams.text_opening import open_texts
from streampack.streams.token_stream import Opening, TokenStream

ENDS = ("bos", "eos")


@with_known_options
@dataclass(frozen=True, slots=True, eq=False)
class TokenFiles:
    """Token ids in files of Megatron, OLMo, datatrove or Arrow, or in rows with lists of ids.

    Raises:
        ConfigError: If the options are invalid or contradict each other.

    >>> TokenFiles("s3://bucket/code/*.npy", dtype="uint16", has=("eos",)).unit
    'document'
    """

    files: Any
    """A folder, a file, a file name without its ending, a glob, or a list of files. Or rows of
    token ids: a path or glob of Parquet or JSON lines, a list, a pandas or pyarrow table, or a
    Hugging Face `Dataset`. Rows are copied into the cache once per node, shard by shard."""
    local: str | os.PathLike[str] | None = None
    """Cache folder for rows, and for files of a store. None: a folder of this user inside the
    system's temporary folder, which is reused."""
    format: str | TokenFormat | None = None
    """"megatron", "olmo", "datatrove" or "arrow", one that an entry point registers, or your own
    format. None: detected from the file names."""
    tokens: str = "tokens"
    """Column of the tokens, in formats that have columns; for the default, "input_ids" is accepted
    too. The type may be added to the name: "tokens:uint16"."""
    dtype: str | None = None
    """Type of the ids, such as "uint16", for raw files that do not record it."""
    labels: str | None = None
    """Column of labels in rows, one per token. None: the label of a token is the next token."""
    labels_shifted: bool | None = None
    """Whether labels[i] is the target at token i (True), or token i itself or -100 (False). None:
    detect from the first samples."""
    loss_mask: str | None = None
    """Column in rows that marks the targets, 1 or 0 for each token. A mask next to token files is
    found by its name."""
    unit: Literal["document", "sequence"] = "document"
    """What a sample of Megatron's files is: a "document", or one "sequence" of a document."""
    only: slice | None = None
    """The samples to use, as a slice of neighbouring ones. None: all."""
    index: str | os.PathLike[str] | None = None
    """Folder that `streampack index --out` wrote: where documents begin and end, with hashes, or
    the row counts of JSON lines. None: use the files' own tables."""
    split_at: int | None = None
    """Token that ends a document inside a row, if rows are joined documents. Samples are then
    documents, and `index` must have their boundaries."""
    has: Sequence[Literal["bos", "eos"]] | None = None
    """Special tokens that every sample already has: ("bos", "eos") if it begins with
    `Packing.bos_id` and ends with `Packing.eos_id`, () if neither. None: taken from `index`, or
    unknown."""
    trailing: Literal["ignore"] | None = None
    """Handling of tokens after the last document of a table. None: up to 1 % of a file is a
    warning, more is an error. "ignore": they are not read, however many there are."""
    on_bad_row: Literal["error", "skip"] = "error"
    """How to handle a row that cannot become a sample: raise an "error", or "skip" it and count it
    in a warning."""
    download: Download | None = None
    """How files are fetched, verified and kept. None: `Download()`."""

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, Literal["document", "sequence"])
        for name, choices in (("dtype", DTYPES), ("trailing", ("ignore",))):
            if (value := getattr(self, name)) is not None:
                check_choice(name, value, choices)
        if self.has is not None:
            check_names("has", self.has)
            for end in self.has:
                check_choice("has", end, ENDS)
            object.__setattr__(self, "has", tuple(self.has))
        check_source(self)
        if self.dtype is not None and ColumnSelection.of(self).tokens_dtype is not None:
            raise ConfigError(
                f"dtype={self.dtype!r} and tokens={self.tokens!r} both have a type; keep one"
            )
        useless: tuple[str, ...] = ("labels", "loss_mask")
        what = (
            "token files: a loss mask next to a file is found by its name, and labels need a "
            "stream with such a column (streampack write)"
        )
        if self.is_rows:
            useless = ("dtype", "format", "split_at", "has", "trailing", "download")
            what = "rows of token ids, but only to token files"
        for name in useless:
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name}={short_text(value)} does not apply to {what}; omit it")

    @property
    def is_rows(self) -> bool:
        """Whether these are rows of token ids, rather than files that are read where they are."""
        if isinstance(self.files, str):
            return self.format is None and names_rows(self.files)
        return not is_paths(self.files)

    def open(self, opening: Opening) -> TokenStream:
        """Read the files' tables, or write the rows once, and return the stream."""
        if not self.is_rows:
            return open_flat(self, opening)
        columns = ColumnSelection.of(self)
        kept = tuple(name for name in (columns.labels, columns.loss_mask) if name is not None)
        return open_texts(self, opening, columns, tokens=columns.tokens, columns=kept)
