"""Length files for streams in a store: what `streampack index s3://bucket/stream` does.

::

    s3://bucket/stream --shard by shard--> local folder --> lengths.bin --> s3://bucket/stream

Shards are fetched, checked and decompressed as for training. In a temporary folder only one of them
lies at a time; a folder that is named keeps them all, for training from there.

Cost: one download of the stream; 12 bytes of memory a sample.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.paths import home_path
from streampack.streams import Stream, mosaic, parse_index
from streampack.streams.cache import ShardCache
from streampack.streams.files import StreamFiles
from streampack.streams.lengths import LENGTH_FILE
from streampack.streams.mds import ByteArray
from streampack.streams.opened import ColumnChoice
from streampack.write.lengths import Indexed, count_stream

__all__ = ["write_remote_lengths"]

WAY_OUT = (
    "use a store and credentials that can write, or keep the file with --keep-local --local=FOLDER "
    "and train with local=FOLDER"
)


def write_remote_lengths(
    remote: str,
    column: str | None = None,
    tokens_dtype: str | None = None,
    progress: Callable[[int], None] | None = None,
    *,
    local: Path | None = None,
    keep_local: bool = False,
) -> Indexed:
    """Write a length file beside the index.json of a stream in a store.

    Args:
        remote: The stream's URL, of any store that MosaicML Streaming can read.
        column: The token column; None: "tokens" or "input_ids".
        tokens_dtype: Type of the values if the column is stored as `bytes`.
        progress: Called with 1 after each shard.
        local: Folder that keeps the shards and the length file; None: a temporary one.
        keep_local: Keep the length file in `local` and write nothing to the store.

    Raises:
        ConfigError: If the file is to be kept, but no folder is named.
        DataError: If the stream cannot be read, is not what its index.json says, or the store
            cannot be written; a length file that was made by then is kept, and named.
    """
    if keep_local and local is None:
        raise ConfigError("--keep-local=True, but --local=None; name the folder to keep it in")
    choice = ColumnChoice(tokens=column or "tokens", tokens_dtype=tokens_dtype)
    with ExitStack() as stack:
        # First, so that a store that cannot be written is known before anything is read.
        uploader = None if keep_local else stack.enter_context(_uploader_of(remote))
        if local is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="streampack-"))
        folder = Path(home_path(name if local is None else local))
        cache = ShardCache(StreamFiles.of(Stream(remote=remote, local=str(folder))))
        text = cache.index_bytes()
        index = parse_index(text, cache.index_uri)
        cache.check(index)

        def shards() -> Iterator[ByteArray]:
            for shard in index.shards:
                path = cache.path(shard)
                yield np.asarray(np.memmap(path, np.uint8, "r"))
                if local is None:
                    path.unlink()
                if progress is not None:
                    progress(1)

        indexed = count_stream(text, index, choice, shards(), folder / LENGTH_FILE)
        if uploader is None:
            return indexed
        _upload(uploader, folder / LENGTH_FILE, remote, is_kept=local is not None)
    return replace(indexed, path=f"{remote.rstrip('/')}/{LENGTH_FILE}")


@contextmanager
def _uploader_of(remote: str) -> Iterator[Any]:
    """Make MosaicML's uploader for a stream's URL, and remove its folder in the end."""
    # What it knows of a Hugging Face URL is split at its 5th slash, which must be there.
    out = f"{remote.rstrip('/')}/" if remote.startswith("hf://") else remote
    try:
        uploader = mosaic.CloudUploader.get(out, keep_local=True, exist_ok=True)
    except Exception as error:  # every store has errors of its own
        raise DataError(
            f"{remote}: cannot be written ({type(error).__name__}: {error}); {WAY_OUT}", uri=remote
        ) from error
    try:
        yield uploader
    finally:
        shutil.rmtree(uploader.local, ignore_errors=True)


def _upload(uploader: Any, file: Path, remote: str, *, is_kept: bool) -> None:
    """Upload a length file; if that fails, the work of reading the stream is not lost."""
    # Hugging Face's uploader puts files at the repository's root, unless their names say where.
    name = os.path.join(getattr(uploader, "path", ""), LENGTH_FILE)
    copy = Path(uploader.local, name)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
    try:
        uploader.upload_file(name)
    except Exception as error:  # every store has errors of its own
        if not is_kept:
            file = Path(shutil.move(file, tempfile.mkdtemp(prefix="streampack-lengths-")))
        raise DataError(
            f"{remote}: cannot be written ({type(error).__name__}: {error}); the length file is "
            f"in {file}: copy it beside index.json, or {WAY_OUT}",
            uri=remote,
        ) from error
