"""Open the streams of a dataset, ours and MosaicML's, and limit their cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from streampack.config.download import Download
from streampack.errors import ConfigError
from streampack.storage.cache import ShardCache
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.materialize import Downloader
from streampack.storage.mosaicml import (
    NOT_CALLED,
    is_mosaicml_stream,
    own_download,
    temporary_root,
)
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.mds_opening import open_mds
from streampack.streams.other_shards import OpenedSource, OtherShards
from streampack.streams.parts import Numbering, chosen_shards, digest_text
from streampack.streams.sources.shards import Shards
from streampack.streams.stream import Stream
from streampack.streams.token_stream import Opening, TokenStream

WEIGHTS = ("proportion", "repeat", "choose")
DOWNLOAD = {
    "download_retry": "retry",
    "download_timeout": "timeout",
    "validate_hash": "hash",
    "keep_zip": "keep_zip",
}


def open_stream(stream: Any, number: int, **options: Any) -> TokenStream:
    """Open a `Stream`, ours or MosaicML's, through its source.

    `options` are further fields of `Opening`. The errors are those of the source.
    """
    location = None
    if is_mosaicml_stream(stream):
        stream, location = adopted(stream)
    check_methods(type(stream))
    opening = Opening(stream=stream, number=number, **options)
    if location is not None:
        return open_mds(stream.source, location, opening)
    opened = stream.source.open(opening)
    return opened if isinstance(opened, TokenStream) else _open_other(opened, opening)


def adopted(stream: Any) -> tuple[Stream, StreamLocation]:
    """Return a `streaming.Stream` as a stream of ours, without changing it, and where it is.

    Raises:
        ConfigError: If its class overrides what would be ignored, or a library is missing.
    """
    stated = {name: getattr(stream, option, None) for option, name in DOWNLOAD.items()}
    download = Download(**{name: value for name, value in stated.items() if value is not None})
    location = StreamLocation.of(
        remote=stream.remote,
        local=stream.local,
        split=stream.split or "",
        download=download,
        temporary_root=temporary_root(stream),
        own_download=own_download(stream, download.timeout),
    )
    # Under the public names of the weights, `apply_weights` writes what it computed.
    weights: dict[str, Any] = {name: getattr(stream, f"_{name}", None) for name in WEIGHTS}
    shards = Shards(local=location.root, split=stream.split)
    return Stream(shards, **weights), location


def check_methods(kind: type) -> None:
    """Refuse a class of ours with methods of MosaicML's that are never called."""
    defined = [name for name in ("_download_file", *NOT_CALLED) if hasattr(kind, name)]
    if defined:
        raise ConfigError(
            f"{kind.__name__} defines {', '.join(defined)}, which streampack never calls "
            "on a streampack.Stream; derive the class from streaming.Stream, in which "
            "_download_file may be overridden, or copy the files to where streampack can fetch them"
        )


def _open_other(opened: OpenedSource, opening: Opening) -> TokenStream:
    """Return the stream of a source of others."""
    name = opening.stream.name or opened.name
    first_sample = np.concatenate([[0], np.cumsum(opened.shards)]).astype(np.int64)
    numbers, part = chosen_shards(opening.stream.held_out, Numbering.of_stream(first_sample), name)
    counts = np.diff(first_sample)[numbers]
    shards = OtherShards(
        name=name,
        opened=opened,
        cache=ShardCache(StreamLocation.of(local=""), opening.disk),
        numbers=numbers,
        first_sample=np.concatenate([[0], np.cumsum(counts)]),
    )
    content = hashlib.blake2b(opened.digest.encode() + digest_text(part), digest_size=16)
    content.update(numbers.tobytes() + counts.tobytes())
    digest = content.hexdigest()
    return TokenStream.of(opening, name, shards, part, columns=ColumnSelection(), digest=digest)


def open_streams(
    streams: Sequence[Any],
    *,
    cache_limit: int | None = None,
    num_workers: int | None = None,
    disk: LocalFilesystem | None = None,
    store: Downloader | None = None,
) -> tuple[TokenStream, ...]:
    """Open the streams of a dataset, numbered from 0; raise a DataError as `open_stream`.

    `cache_limit` limits the bytes of their fetched and decompressed files on this node, and
    `num_workers` are the processes that tokenize texts. Without a
    `disk` and a `store`, they use this machine's disk and their own downloaders. A ConfigError says
    that other nodes may use a folder with a limit.
    """
    disk = disk or LocalFilesystem()
    given: dict[str, Any] = {"disk": disk, "store": store, "num_workers": num_workers}
    given["cache_limit"] = cache_limit
    opened = tuple(open_stream(stream, number, **given) for number, stream in enumerate(streams))
    folders = [stream.cache_folders() for stream in opened]
    if cache_limit is None or not any(folders):
        return opened
    shared = tuple(dict.fromkeys(chain.from_iterable(folders)))  # streams may share a folder
    for folder in shared:
        if disk.is_network(folder):
            raise ConfigError(
                f"cache_limit={cache_limit}: {folder} is on a network file system, where "
                "other nodes may use its files; set local= to a folder of this node's own disk, "
                "or omit cache_limit"
            )
    limit = CacheLimit(cache_limit, shared, disk)
    for stream, is_evictable in zip(opened, folders, strict=True):
        if is_evictable:
            stream.cache.keep_within(limit)
    return opened
