"""Formats of input files, by the suffixes of their names.

::

    rows.JSONL.zst  -->  jsonl, zst
    part-0.parquet  -->  parquet

Other suffixes are refused: a settings file would be trained on as plain text.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from streampack.write.inputs.slices import Compression, Format

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
TABLES = ("parquet", "arrow")
"""Formats with column types and a compression of their own; pyarrow reads them."""


def format_of(name: str) -> tuple[Format, Compression | None] | None:
    """Return a file's format and compression; None if its suffix is not supported.

    >>> format_of("s3://bucket/rows.JSONL.zst"), format_of("a.parquet"), format_of("a.parquet.gz")
    (('jsonl', 'zst'), ('parquet', None), None)
    """
    path = PurePosixPath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    found = FORMATS.get(PurePosixPath(path.stem).suffix if compression else path.suffix)
    if found is None or (compression and found in TABLES):
        return None
    return found, compression


def supported() -> str:
    """Return the supported suffixes as text, for messages."""
    return f"{', '.join(FORMATS)}, and all but {' and '.join(TABLES)} with .gz or .zst too"
