"""What token shards are named by, and what the fingerprint of a run has of texts."""

from __future__ import annotations

from dataclasses import dataclass

from streampack.texts.rows import RowEncoder, RowFormat
from streampack.texts.table import TextTable
from streampack.texts.transform import Transform


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the ids of a row depend on, besides the row."""

    options: str
    """Tokenizer by content, options of a `RowFormat` that change ids, and transform, as JSON."""
    versions: str
    """Versions of libraries, as JSON; they are in names, and not in fingerprints."""

    @classmethod
    def of(cls, rows: RowFormat, transform: Transform | None = None) -> Identity:
        """Return the identity of rows of a format; loads the tokenizer."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The first 256 rows, 1 MiB of text at most, as token ids."""

    digest: str
    """Digest of the ids, and of the loss masks of conversations."""
    tokens_per_byte: float
    """Tokens divided by bytes of text, for estimates; 0.25 if there is no text."""


def shard_name(table: TextTable, number: int, identity: Identity) -> str:
    """Return the name of a token shard: 32 hex digits of versions of files, rows and identity."""
    raise NotImplementedError


def probe(
    table: TextTable, rows: RowFormat, encoder: RowEncoder, transform: Transform | None = None
) -> Probe:
    """Return the ids of the first rows of a table."""
    raise NotImplementedError


def fingerprint(table: TextTable, identity: Identity, probed: Probe) -> str:
    """Return what a resume compares: a digest of the table, the options and the probe's ids."""
    raise NotImplementedError
