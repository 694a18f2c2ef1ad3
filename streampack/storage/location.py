"""The location of a stream's files, local and remote.

::

    Stream(remote, local, split, ...) --copied--> StreamLocation --> download.py, cache.py
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from dataclasses import dataclass
from inspect import getattr_static
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streampack._paths import folder_of
from streampack.errors import ConfigError
from streampack.mds import mosaic
from streampack.mds.index import INDEX_FILE

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
DEFAULTS = {"download_retry": 2, "download_timeout": 60.0, "keep_zip": False}
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

        A ConfigError names the methods that its class overrides, but that are never called here.
        """
        _check_overrides(stream)
        stream = copy.copy(stream)
        for field, default in DEFAULTS.items():
            if getattr(stream, field, None) is None:
                setattr(stream, field, default)
        # A downloader may hold a client, which must not be shared with another thread or process.
        stream._downloader = None
        stream.safe_keep_zip = stream.keep_zip or stream.remote in (None, stream.local)
        split = stream.split or ""
        return cls(
            stream=stream,
            folder=Path(stream.local, split),
            remote=stream.remote and os.path.join(stream.remote, split).rstrip("/"),
        )

    def uri(self, basename: str) -> str:
        """Return the origin of one of the stream's files, for messages."""
        return os.path.join(self.remote or self.folder, basename)

    @property
    def index_uri(self) -> str:
        """The origin of the stream's index.json, for messages."""
        return self.uri(INDEX_FILE)

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
        stream, root = self.stream, Path(tempfile.gettempdir())
        ours = getattr(stream, "_temporary_root", None)
        if ours is not None:
            return Path(ours)
        if self.remote is None or getattr(stream, "_local", "") is not None:
            return None
        # MosaicML's choice. A subclass may choose another folder, which is its own responsibility.
        chosen, local = Path(stream._get_temporary_directory()), Path(stream.local)
        is_mosaicml = local == chosen and local.is_relative_to(root)
        return root / local.relative_to(root).parts[0] if is_mosaicml else None


def _check_overrides(stream: Any) -> None:
    """Refuse a stream of a user's class whose overrides would be ignored."""
    downloader = getattr(stream, "_downloader", None)
    if downloader is not None and type(downloader) not in mosaic.DOWNLOADER_MAPPINGS.values():
        name = type(downloader).__name__
        raise ConfigError(
            f"{type(stream).__name__} sets _downloader to a {name}, which streampack would not "
            "use: it makes a downloader for each thread by the remote's scheme; register the class "
            "there, streaming.base.storage.download.DOWNLOADER_MAPPINGS['scheme'] = "
            f"{name}, or override _download_file"
        )
    theirs = vars(mosaic.Stream)
    overridden = [n for n in NOT_CALLED if getattr_static(stream, n) is not theirs[n]]
    if overridden:
        raise ConfigError(
            f"{type(stream).__name__} overrides {', '.join(overridden)}, which streampack never "
            "calls: it reads index.json, fetches, checks and weighs by itself. To fetch in another "
            "way, override _download_file; otherwise let MosaicML read the stream: "
            "PackedIterableDataset([IterableStream(StreamingDataset(streams=[stream]))])"
        )
