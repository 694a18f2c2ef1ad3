"""Options of writing files as a stream, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streampack._checks import check_choice, parse_share, read_count
from streampack.errors import ConfigError
from streampack.mds.columns import DTYPES
from streampack.texts.rows import RowFormat
from streampack.texts.token_shard import OnBadRow

EngineName = Literal["processes", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Summary of a written stream, or of one that is being written."""

    path: Path | str
    """The stream's folder; in a store, its URL."""
    num_samples: int
    num_tokens: int
    num_shards: int
    num_skipped: int
    """Number of samples skipped because they had no tokens."""
    num_without_targets: int
    """Number of samples with a `loss_mask` of zeros, in which nothing is learned."""
    num_dropped: int = 0
    """Number of samples of conversations skipped because nothing in them is learned."""
    num_bad_rows: int = 0
    """Number of rows skipped because they could not become samples."""
    num_special_tokens: int = 0
    """Number of special tokens that texts spell and that were written as ids."""
    tokenizer: dict[str, Any] | None = None
    """Its name, size, BOS and EOS, and the tokens that its template adds `before` and `after`."""
    num_bytes: int = 0
    """Bytes of the input files that were read, at rest."""
    total_bytes: int = 0
    num_parts: int = 1
    """Number of parts that are done."""
    total_parts: int = 1

    @property
    def is_complete(self) -> bool:
        """Whether all parts are done, so that the stream has its index.json."""
        return self.num_parts == self.total_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options for writing files as a stream.

    Raises:
        ConfigError: If an option is invalid.
    """

    rows: RowFormat = field(default_factory=RowFormat)
    """Format of a row."""
    column: str = "tokens"
    """Name of the token column."""
    tokens_dtype: str | None = None
    """Type of the stored tokens. By default uint16 if the tokenizer's ids fit in it, else int32."""
    compression: str | None = "zstd"
    """MosaicML's name of a compression, or None for raw shards."""
    size_limit: int | str | None = "64mb"
    """Bytes of a shard before compression."""
    num_workers: int | None = None
    """Number of tokenizing processes, or None for one per core, or one for small files."""
    part_bytes: int | str = "256mb"
    """Bytes of input in a part, of which an interrupted job loses one per process. Those of MDS and
    of large Parquet files count without compression."""
    engine: EngineName = "processes"
    """Where parts are written: "processes" of this machine, or "ray" for a Ray cluster."""
    part: str | None = None
    """"K/N": write every N-th part only, from the K-th on, counted from 1, and do not commit."""
    append: bool = False
    """Add inputs that the stream does not have yet."""
    on_bad_row: OnBadRow = "error"
    """What a row that cannot become a sample does: raise an error, or be counted and omitted."""
    max_bad_rows: int = 1000
    """Number of bad rows that may be skipped."""

    @property
    def most_bad_rows(self) -> int:
        """Bad rows that may be skipped; 0: none."""
        return self.max_bad_rows if self.on_bad_row == "skip" else 0

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            read_count("num_workers", self.num_workers, "omit it to start one process per core")
        check_choice("engine", self.engine, EngineName)
        check_choice("on_bad_row", self.on_bad_row, OnBadRow)
        least = int(self.on_bad_row == "skip")
        if self.max_bad_rows < least:
            raise ConfigError(
                f"max_bad_rows={self.max_bad_rows} must be {least} or more with on_bad_row="
                f"{self.on_bad_row!r}; set it to the number of rows that may be skipped",
                option="max_bad_rows",
            )
        if self.tokens_dtype is not None:
            check_choice("tokens_dtype", self.tokens_dtype, DTYPES)
        if self.part is not None:
            parse_share(self.part)
