"""Real MDS files for tests, in which every token encodes its own position.

Token `i` of sample `s` of a stream written with `seed` k is ``k * 7_919 + s * 101 + i`` modulo a
prime below the dtype's limit. Neighbouring tokens of a sample differ by one; samples and streams
differ by other amounts, so a test can tell from any token whether it is in the right place.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from streampack.index import write_lengths
from streampack.storage.filesystem import LocalFilesystem
from streampack.streams import Stream

PRIMES = {
    "int8": 127,
    "uint8": 251,
    "int16": 32_749,
    "uint16": 65_521,
    "int32": 1_000_003,
    "uint32": 1_000_003,
    "int64": 1_000_003,
}


def tokens_of(seed: int, sample: int, length: int, dtype: str = "int32") -> np.ndarray:
    """Return the tokens that sample `sample` of stream `seed` must have, shape (length,)."""
    values = seed * 7_919 + sample * 101 + np.arange(length, dtype=np.int64)
    return (values % PRIMES[dtype]).astype(dtype)


def encode(tokens: np.ndarray, encoding: str) -> Any:
    return tokens.tobytes() if encoding == "bytes" else tokens


def write_stream_files(
    folder: Path,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    dtype: str = "int32",
    encoding: str | None = None,
    column: str = "tokens",
    compression: str | None = None,
    size_limit: int | str | None = 4096,
    hashes: Sequence[str] = (),
    lengths_file: bool = True,
    extra_columns: bool = False,
    columns: dict[str, str] | None = None,
    values: dict[str, Sequence[Any]] | None = None,
) -> tuple[Path, list[np.ndarray]]:
    """Write an MDS stream with MosaicML's own writer."""
    encoding = encoding or f"ndarray:{dtype}"
    layout = {column: encoding, **(columns or {})}
    if extra_columns:
        layout |= {"a_text": "str", "b_number": "int", "y_blob": "bytes", "z_half": "float16"}
    samples = [tokens_of(seed, i, length, dtype) for i, length in enumerate(lengths)]
    # Imported here because worker processes import this module too, and do not need MosaicML's.
    with import_module("streaming").MDSWriter(
        out=str(folder),
        columns=layout,
        compression=compression,
        size_limit=size_limit,
        hashes=sorted(hashes),
    ) as writer:
        for i, tokens in enumerate(samples):
            row = {column: encode(tokens, encoding)}
            row |= {name: of_sample[i] for name, of_sample in (values or {}).items()}
            if extra_columns:
                row |= {
                    "a_text": "x" * (i % 7),
                    "b_number": i,
                    "y_blob": b"y" * (i % 5),
                    "z_half": i / 2,
                }
            writer.write(row)
    if lengths_file:
        write_lengths(folder, tokens=f"{column}:{dtype}" if encoding == "bytes" else column)
    return folder, samples


def stream_of(
    folder: Path, lengths: Sequence[int], *, seed: int = 0, weights: dict[str, Any] | None = None
) -> Stream:
    path, _ = write_stream_files(folder, lengths, seed=seed)
    return Stream(local=str(path), **(weights or {}))


class ReadOnlyDisk(LocalFilesystem):
    """A disk on which nothing can be written, not even by root."""

    def _refuse(self, path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    write = rename = touch = make_folder = lock = _refuse
