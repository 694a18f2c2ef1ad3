"""MosaicML Streaming's classes in streampack: the only module that imports `streaming`.

::

    streams=[streaming.Stream(...)]    remote="oci://..."    adopt, own_download
    stream_name="..."                                        registered_streams

Other modules import this one by name, and only when a stream needs it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import getattr_static
from pathlib import Path
from typing import Any

from streaming.base.storage.download import DOWNLOADER_MAPPINGS, CloudDownloader
from streaming.base.stream import Stream, streams_registry

from streampack.errors import ConfigError
from streampack.storage.location import NOT_CALLED

AZURE_SCOPE = "https://storage.azure.com/.default"
# Stores that need an extra of MosaicML's package, by that extra.
EXTRAS = {"alipan": "alipan", "dbfs": "databricks"}


def _download(stream: Any, basename: str, to: Path) -> None:
    """Fetch one file of a stream without a client, by its class's method, in one attempt."""
    stream = copy.copy(stream)
    stream._downloader = client = CloudDownloader.get(stream.remote)
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


def adopt(stream: Any, copied: Any) -> Path | None:
    """Complete the copy of a `streaming.Stream`; return its temporary root."""
    for name in ("proportion", "repeat", "choose"):
        # Under the public names, `apply_weights` writes what it computed.
        setattr(copied, name, getattr(stream, f"_{name}", None))
    # A downloader may hold a client, which must not be shared with another thread or process.
    copied._downloader = None
    if stream.remote is None or getattr(stream, "_local", "") is not None:
        return None
    # MosaicML's choice. A subclass may choose another folder, which is its own responsibility.
    root, local = Path(tempfile.gettempdir()), Path(stream.local)
    is_mosaicml = local == Path(stream._get_temporary_directory()) and local.is_relative_to(root)
    return root / local.relative_to(root).parts[0] if is_mosaicml else None


def own_download(
    stream: Any, copied: Any, *, is_needed: bool
) -> Callable[[str, Path], None] | None:
    """Return what fetches a stream by MosaicML's rules, or by those of a user's class.

    For a `streaming.Stream`, None unless it `is_needed`, its class overrides `_download_file`, or
    its downloader is one that a user registered. `copied` is a copy with defaults set. A
    ConfigError names the overrides that would be ignored, or the missing library of a store.
    """
    if not isinstance(stream, Stream):
        return partial(_download, _theirs(copied))
    _check_overrides(stream)
    client = type(getattr(stream, "_downloader", None))
    is_registered = client is not type(None) and not client.__module__.startswith("streaming.")
    is_own = getattr_static(stream, "_download_file") is not vars(Stream)["_download_file"]
    return partial(_download, copied) if is_needed or is_registered or is_own else None


def _theirs(stream: Any) -> Any:
    """Return a `streaming.Stream` without a client, for the location of a `streampack.Stream`."""
    names = ("remote", "local", "split", "download_timeout")
    try:
        made = Stream(**{name: getattr(stream, name) for name in names})
        made._downloader.clean_up()
    except Exception as error:  # each client raises its own exceptions
        extra = EXTRAS.get(stream.remote.partition(":")[0])
        package = f"'mosaicml-streaming[{extra}]'" if extra else "mosaicml-streaming"
        way_out = f"pip install {package}" if isinstance(error, ImportError) else "set it up"
        raise ConfigError(
            f"remote={stream.remote!r}: the client of this store cannot be made "
            f"({type(error).__name__}: {error}); {way_out}"
        ) from error
    made._downloader = None
    return made


def _check_overrides(stream: Any) -> None:
    kind, downloader = type(stream).__name__, type(getattr(stream, "_downloader", None))
    if downloader not in (type(None), *DOWNLOADER_MAPPINGS.values()):
        name = downloader.__name__
        raise ConfigError(
            f"{kind} sets _downloader to a {name}, which streampack would not use: it makes a "
            "downloader for each file by the remote's scheme; register the class there, "
            f"streaming.base.storage.download.DOWNLOADER_MAPPINGS['scheme'] = {name}, or override "
            "_download_file"
        )
    overridden = [n for n in NOT_CALLED if getattr_static(stream, n) is not vars(Stream)[n]]
    if overridden:
        raise ConfigError(
            f"{kind} overrides {', '.join(overridden)}, which streampack never calls: it reads "
            "index.json, fetches, checks and weighs by itself. To fetch in another way, override "
            "_download_file; otherwise let MosaicML read the stream: "
            "PackedIterableDataset([IterableStream(StreamingDataset(streams=[stream]))])"
        )


def registered_streams() -> dict[str, Any]:
    """Return the classes in MosaicML's `streams_registry` by name."""
    return dict(streams_registry.get_all())
