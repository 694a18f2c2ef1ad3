"""MosaicML Streaming's classes in streampack: the only file that names its package.

::

    streams=[streaming.Stream(...)]    remote="oci://..."    own_download, client_of
    stream_name="..."                                        registered_streams

The package is imported when a stream needs it, and streams are recognized without it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from inspect import getattr_static
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streampack._extras import import_extra, is_from
from streampack.errors import ConfigError
from streampack.stores.drivers import AZURE_SCOPE

STREAMS = "streaming.base.stream"
# Stores that need an extra of MosaicML's package, by that extra.
EXTRAS = {"alipan": "alipan", "dbfs": "databricks"}
# Stores that only MosaicML's downloaders can read.
MOSAICML_SCHEMES = ("alipan", "azure-dl", "dbfs", "oci")
# Methods of MosaicML's `Stream` that are never called here, but would change samples or weights.
NOT_CALLED = (
    "_decompress_shard_part",
    "_prepare_shard_part",
    "apply_default",
    "apply_weights",
    "get_shards",
    "prepare_shard",
    "set_up_local",
    "validate_weights",
)


def is_mosaicml_stream(stream: object) -> bool:
    """Return whether this is a `streaming.Stream` or of a subclass, without importing its package.

    >>> is_mosaicml_stream([])
    False
    """
    return is_from(stream, "streaming", "Stream")


def _download(stream: Any, basename: str, to: Path) -> None:
    """Fetch one file of a stream without a client, by its class's method, in one attempt."""
    stream = copy.copy(stream)
    stream._downloader = client = _downloads(stream.remote).CloudDownloader.get(stream.remote)
    stream.download_retry = 1  # how often to try again is decided by the caller
    try:
        if hasattr(credential := getattr(client, "credential", ""), "get_token"):
            # Azure's clients try a request without credentials again for more than a minute.
            credential.get_token(AZURE_SCOPE)
        folder = os.path.join(stream.local, stream.split or "")
        stream._download_file(basename, os.path.relpath(to, folder))
    finally:
        with suppress(Exception):
            client.clean_up()


def temporary_root(stream: Any) -> Path | None:
    """Return MosaicML's folder for an unset `local`; a subclass may choose another one itself."""
    if stream.remote is None or getattr(stream, "_local", "") is not None:
        return None
    root, local = Path(tempfile.gettempdir()), Path(stream.local)
    is_theirs = local == Path(stream._get_temporary_directory()) and local.is_relative_to(root)
    return root / local.relative_to(root).parts[0] if is_theirs else None


def own_download(stream: Any, timeout: float) -> Callable[[str, Path], None] | None:
    """Return what fetches a `streaming.Stream` by MosaicML's rules, or by those of its class.

    None unless nothing else reads its store, its class overrides `_download_file`, or its
    downloader is one that a user registered. A ConfigError names the overrides that would be
    ignored, or the missing library of a store.
    """
    _check_overrides(stream)
    client = type(getattr(stream, "_downloader", None))
    is_needed = urlsplit(stream.remote or "").scheme in MOSAICML_SCHEMES
    is_registered = client is not type(None) and not client.__module__.startswith("streaming.")
    is_own = "_download_file" in _overridden(stream, ("_download_file",))
    if not (is_needed or is_registered or is_own):
        return None
    copied = copy.copy(stream)
    # A downloader may hold a client, which must not be shared with another thread or process.
    copied._downloader, copied.download_timeout = None, timeout
    return partial(_download, copied)


def client_of(remote: str, local: str, split: str, timeout: float) -> Callable[[str, Path], None]:
    """Return what fetches from a store that only MosaicML's downloaders can read.

    Raises:
        ConfigError: If the client of the store cannot be made, such as without its library.
    """
    made_of = import_extra(STREAMS, "mosaicml", f"remote={remote!r}").Stream
    try:
        made = made_of(remote=remote, local=local, split=split or None, download_timeout=timeout)
        made._downloader.clean_up()
    except Exception as error:  # each client raises its own exceptions
        extra = EXTRAS.get(remote.partition(":")[0])
        package = f"'mosaicml-streaming[{extra}]'" if extra else "mosaicml-streaming"
        way_out = f"pip install {package}" if isinstance(error, ImportError) else "set it up"
        raise ConfigError(
            f"remote={remote!r}: the client of this store cannot be made "
            f"({type(error).__name__}: {error}); {way_out}"
        ) from error
    made._downloader = None
    return partial(_download, made)


def _check_overrides(stream: Any) -> None:
    kind, downloader = type(stream).__name__, type(getattr(stream, "_downloader", None))
    if downloader not in (type(None), *_downloads(stream.remote).DOWNLOADER_MAPPINGS.values()):
        name = downloader.__name__
        raise ConfigError(
            f"{kind} sets _downloader to a {name}, which streampack would not use: it makes a "
            "downloader for each file by the remote's scheme; register the class there, "
            f"streaming.base.storage.download.DOWNLOADER_MAPPINGS['scheme'] = {name}, or override "
            "_download_file"
        )
    if overridden := _overridden(stream, NOT_CALLED):
        raise ConfigError(
            f"{kind} overrides {', '.join(overridden)}, which streampack never calls: it reads "
            "index.json, fetches, checks and weighs by itself. To fetch in another way, override "
            "_download_file; otherwise let MosaicML read the stream: "
            "PackedIterableDataset([IterableStream(StreamingDataset(streams=[stream]))])"
        )


def _overridden(stream: Any, names: Iterable[str]) -> list[str]:
    own = vars(import_extra(STREAMS, "mosaicml", "streaming.Stream").Stream)
    return [name for name in names if getattr_static(stream, name) is not own[name]]


def _downloads(remote: str | None) -> Any:
    return import_extra("streaming.base.storage.download", "mosaicml", f"remote={remote!r}")


def registered_streams(wanted: str) -> dict[str, Any]:
    """Return the classes in MosaicML's `streams_registry` by name; `wanted` begins an error."""
    return dict(import_extra(STREAMS, "mosaicml", wanted).streams_registry.get_all())
