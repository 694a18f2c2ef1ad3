"""Tokenization of text files into a stream: the implementation of `streampack write`.

::

    files --> chunks of rows --> [process 1] --> token ids --> one MDS writer --> OUT
              (in order)    '--> [process 2] --'  (in order)

Any process may encode a chunk, and one process writes the chunks in their order. The stream is
therefore the same, byte for byte, for any number of processes. At most a few chunks per process are
in flight.

Cost: the tokenizer's time divided by the processes; the writer keeps up with about 20 of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streampack.errors import ConfigError
from streampack.types import IntArray
from streampack.write.rows import RowFormat, encode_chunk, load_tokenizer
from streampack.write.shards import Written, write_stream
from streampack.write.text_files import TEXT, Chunk, kind_of, list_files, read_chunks

SMALL_BYTES = 4 << 20  # encoded sooner than a second process could start
CHUNKS_PER_PROCESS = 3

Samples = list[dict[str, IntArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of the write: bytes of the files that were encoded, and what they gave so far."""

    num_bytes: int
    total_bytes: int
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options for writing files as a stream.

    Raises:
        ConfigError: If `num_processes` is less than 1.
    """

    rows: RowFormat = field(default_factory=RowFormat)
    """Format of a row."""
    column: str = "tokens"
    """Name of the token column."""
    dtype: str | None = None
    """Type of the stored tokens; None: uint16 if the tokenizer's ids fit in it, else int32."""
    compression: str | None = "zstd"
    """MosaicML's name of a compression; None: raw shards."""
    size_limit: int | str | None = "64mb"
    """Bytes of a shard before compression."""
    num_processes: int | None = None
    """Number of tokenizing processes; None: one per core, or one for small files."""

    def __post_init__(self) -> None:
        if self.num_processes is not None and self.num_processes < 1:
            raise ConfigError(
                f"num_processes={self.num_processes} must be 1 or more; "
                "leave it out for one process per core"
            )


def write_texts(
    paths: Sequence[Path],
    out: Path,
    options: WriteOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Written:
    """Write text files, folders of them, or JSONL files (plain, .gz or .zst) as one stream.

    Args:
        paths: Files and folders, in order.
        out: The stream's folder; must be new or empty.
        options: Formats, types and processes.
        progress: Called after each chunk.

    Returns:
        A summary of the stream.

    Raises:
        ConfigError: If `out` is not empty, the tokenizer cannot be loaded, or a text file has no
            tokenizer.
        DataError: Naming file and line, if a row does not match the options.
    """
    files = list_files(paths)
    text = next((file for file in files if kind_of(file) in TEXT), None)
    if text is not None and options.rows.tokenizer is None:
        raise ConfigError(
            f"{text}: is text; set tokenizer= to a tokenizer.json, or name JSON lines of token ids"
        )
    total_bytes = sum(file.stat().st_size for file in files)
    dtype = options.dtype or _choose_dtype(options.rows)
    default_processes = 1 if total_bytes < SMALL_BYTES else os.cpu_count() or 1
    num_processes = options.num_processes or default_processes
    encoded = encode_all(read_chunks(files), options.rows, num_processes)
    return write_stream(
        _samples_of(encoded, options.column, total_bytes, progress),
        out,
        column=options.column,
        dtype=dtype,
        compression=options.compression,
        size_limit=options.size_limit,
    )


def _choose_dtype(rows: RowFormat) -> str:
    if rows.tokenizer is None:
        return "int32"
    return "uint16" if load_tokenizer(rows.tokenizer).get_vocab_size() <= 2**16 else "int32"


def encode_all(
    chunks: Iterator[Chunk], rows: RowFormat, num_processes: int
) -> Iterator[tuple[Chunk, Samples]]:
    """Yield each chunk with its samples, in order, encoded in `num_processes` processes."""
    if num_processes == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(chunk, rows)
        return
    # Fresh processes, not forks: the caller may run threads, e.g. for a progress bar.
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"))
    pending: deque[tuple[Chunk, Future[Samples]]] = deque()
    try:
        for chunk in chunks:
            with _interrupts_put_off():
                pending.append((chunk, pool.submit(encode_chunk, chunk, rows, is_alone=False)))
            if len(pending) >= CHUNKS_PER_PROCESS * num_processes:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Start processes that ignore a terminal's Ctrl-C; this process terminates them."""
    # Child processes inherit the blocked signals from their first moment on.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _samples_of(
    encoded: Iterator[tuple[Chunk, Samples]],
    column: str,
    total_bytes: int,
    progress: Callable[[Progress], None] | None,
) -> Iterator[dict[str, Any]]:
    num_bytes = num_samples = num_tokens = 0
    for chunk, samples in encoded:
        for sample in samples:
            tokens = sample.pop("tokens")
            num_tokens += len(tokens)
            yield {column: tokens, **sample}
        num_bytes += chunk.num_bytes
        num_samples += len(samples)
        if progress is not None:
            counts = {"num_samples": num_samples, "num_tokens": num_tokens}
            progress(Progress(num_bytes=num_bytes, total_bytes=total_bytes, **counts))
