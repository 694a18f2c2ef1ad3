"""Length files in an object store: the implementation of `streampack index s3://bucket/stream`.

::

    s3://bucket/stream --shard by shard--> local folder --> lengths.bin --> s3://bucket/stream

Shards are fetched, verified and decompressed as for training. A temporary folder holds only one of
them at a time. A named folder keeps them all, so that a later run can train from it.

Cost: one download of the stream; 12 bytes of memory a sample.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from streampack._paths import local_path
from streampack.errors import ConfigError, DataError
from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE
from streampack.storage.cache import ShardCache
from streampack.storage.download import SLOWEST_BYTES_PER_S
from streampack.storage.filesystem import map_file
from streampack.storage.location import StreamLocation
from streampack.stores.retries import ATTEMPT_S, request
from streampack.streams import Stream
from streampack.streams.column_selection import ColumnSelection
from streampack.types import ByteArray
from streampack.write.lengths import Indexed, count_stream

WAY_OUT = (
    "use a store and credentials that can write, or keep the file with keep_local=True and "
    "local='FOLDER', and train with Stream(remote=..., local='FOLDER')"
)


def write_remote_lengths(
    remote: str,
    tokens: str | None = None,
    tokens_dtype: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    local: Path | None = None,
    keep_local: bool = False,
    check_dtypes: bool = True,
) -> Indexed:
    """Write a length file next to the index.json of a stream in an object store.

    Args:
        remote: The stream's URL, of any store that can be read and written.
        tokens: The token column; None: "tokens" or "input_ids".
        tokens_dtype: Type of the values if the column is stored as `bytes`.
        progress: Called with 1 after each shard.
        local: Folder that keeps the shards and the length file; None: a temporary one.
        keep_local: Keep the length file in `local` and write nothing to the store.
        check_dtypes: As in `write_lengths`.

    Raises:
        ConfigError: If keep_local is set without a folder.
        DataError: If the stream cannot be read, does not match its index.json, its values
            contradict their type, or the store cannot be written. A finished length file is then
            kept, and the error names it.
    """
    if keep_local and local is None:
        raise ConfigError(
            f"keep_local={keep_local}, but local={local}; set local= to the folder to keep it in"
        )
    columns = ColumnSelection(tokens=tokens or "tokens", tokens_dtype=tokens_dtype)
    with ExitStack() as stack:
        # First, so that a missing driver is noticed before anything is read.
        if not keep_local:
            request(remote, "written", lambda _: None, way_out=WAY_OUT)
        folder = local_path(
            local or stack.enter_context(tempfile.TemporaryDirectory(prefix="streampack-")), "local"
        )
        cache = ShardCache(StreamLocation.of(Stream(remote=remote, local=str(folder))))
        text = cache.metadata.index_bytes()
        index = parse_index(text, cache.location.index_uri)
        cache.check(index)

        def shards() -> Iterator[ByteArray]:
            """Yield the bytes of each raw shard; its file is removed if `local` is None."""
            for shard in index.shards:
                path = Path(cache.file(shard).path)
                data = map_file(path)
                if local is None:
                    path.unlink()  # the mapping stays
                yield data

        to = folder / LENGTH_FILE
        indexed = count_stream(text, index, columns, shards(), to, progress, check_dtypes)
        if keep_local:
            return indexed
        url = f"{remote.rstrip('/')}/{LENGTH_FILE}"
        _upload(to, url, is_kept=local is not None)
    return replace(indexed, path=url)


def _upload(file: Path, url: str, *, is_kept: bool) -> None:
    """Upload a length file; on failure keep it, so that the stream need not be read again."""
    data = file.read_bytes()
    limit_s = ATTEMPT_S + len(data) / SLOWEST_BYTES_PER_S
    try:
        request(url, "written", lambda store: store.write(url, data), attempt_s=limit_s)
    except DataError as error:
        if not is_kept:
            file = Path(shutil.move(file, tempfile.mkdtemp(prefix="streampack-lengths-")))
        raise DataError(
            f"{error}; the length file is in {file}: copy it next to index.json, or {WAY_OUT}",
            uri=url,
        ) from error
