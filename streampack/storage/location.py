"""The location of a stream's files, local and remote.

::

    Stream(remote, local, split, ...) --copied--> StreamLocation --> download.py, cache.py

Cost: none; no I/O.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streampack._paths import folder_of
from streampack.errors import ConfigError
from streampack.mds import mosaic

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
DEFAULT_RETRY = 2
DEFAULT_TIMEOUT_S = 60.0
PASSWORD = re.compile(r"(?<=//)([^/@:]*):[^/@]*(?=@)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLocation:
    """Where a stream's files are and how to fetch them: a `Stream`'s arguments and defaults."""

    stream: Any
    """A copy of the `Stream`, with defaults set; the user's object is never modified."""
    folder: Path
    """Its local folder, including the split."""
    remote: str | None
    """Its remote folder, including the split."""

    @classmethod
    def of(cls, stream: Any) -> StreamLocation:
        """Copy the relevant arguments of a `Stream`, ours or MosaicML's, without changing it.

        Raises:
            ConfigError: If its class overrides a method that is never called here.
        """
        _check_overrides(stream)
        own = copy.copy(stream)
        for field, default in (
            ("download_retry", DEFAULT_RETRY),
            ("download_timeout", DEFAULT_TIMEOUT_S),
            ("keep_zip", False),
        ):
            if getattr(own, field, None) is None:
                setattr(own, field, default)
        # A downloader may hold a client, which must not be shared with another thread or process.
        own._downloader = None
        own.safe_keep_zip = own.keep_zip or own.remote in (None, own.local)
        split = own.split or ""
        return cls(
            stream=own,
            folder=Path(own.local, split),
            remote=own.remote and os.path.join(own.remote, split).rstrip("/"),
        )

    @property
    def remote_folder(self) -> Path | None:
        """The remote as a folder of this machine; None if it is an object store or unset."""
        folder = None if self.remote is None else folder_of(self.remote)
        return None if folder is None else Path(folder)

    @property
    def owner(self) -> str | None:
        """The remote in canonical form, without a password; None if `local` is the origin."""
        folder = self.remote_folder
        if folder is not None:
            path = os.path.realpath(folder)
            return None if path == os.path.realpath(self.folder) else path
        return None if self.remote is None else PASSWORD.sub(r"\1", urlsplit(self.remote).geturl())

    @property
    def temporary_root(self) -> Path | None:
        """The folder under the system's temporary one that was chosen for an unset `local`."""
        ours = getattr(self.stream, "_temporary_root", None)
        if ours is not None:
            return Path(ours)
        stream, root = self.stream, Path(tempfile.gettempdir())
        if self.remote is None or getattr(stream, "_local", "") is not None:
            return None
        # A subclass may choose another folder, which is its own responsibility.
        chosen, local = Path(stream._get_temporary_directory()), Path(stream.local)
        is_theirs = local == chosen and local.is_relative_to(root)
        return root / local.relative_to(root).parts[0] if is_theirs else None


def _check_overrides(stream: Any) -> None:
    """Refuse a stream of a user's class whose overrides would be ignored."""
    downloader = getattr(stream, "_downloader", None)
    if downloader is not None and type(downloader) not in mosaic.DOWNLOADER_MAPPINGS.values():
        own = type(downloader)
        raise ConfigError(
            f"{type(stream).__name__} sets _downloader to a {own.__name__}, which streampack would "
            "not use: it makes a downloader for each thread by the remote's scheme; register the "
            "class there, streaming.base.storage.download.DOWNLOADER_MAPPINGS['scheme'] = "
            f"{own.__name__}, or override _download_file"
        )
    overridden = [name for name in NOT_CALLED if _is_overridden(stream, name)]
    if overridden:
        raise ConfigError(
            f"{type(stream).__name__} overrides {', '.join(overridden)}, which streampack never "
            "calls: it reads index.json, fetches, checks and weighs by itself. To fetch in another "
            "way, override _download_file; else let MosaicML read the stream: "
            "PackedIterableDataset([IterableStream(StreamingDataset(streams=[stream]))])"
        )


def _is_overridden(stream: Any, name: str) -> bool:
    if name in vars(stream):
        return True
    first = next(each for each in type(stream).__mro__ if name in vars(each))
    return first is not mosaic.Stream
