"""The location of a stream's files, local and remote.

::

    Stream(remote, local, split, ...) --copied--> StreamLocation --> download.py, cache.py
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streampack._paths import folder_of
from streampack.errors import ConfigError
from streampack.mds.index import INDEX_FILE
from streampack.storage.filesystem import private_root
from streampack.storage.mosaicml import (
    MOSAICML_SCHEMES,
    NOT_CALLED,
    adopt,
    is_mosaicml_stream,
    own_download,
)
from streampack.storage.names import remote_digest

DEFAULTS = {"download_retry": 2, "download_timeout": 60.0, "keep_zip": False}
PASSWORD = re.compile(r"(?<=//)([^/@:]*):[^/@]*(?=@)")


class ShardPart(NamedTuple):
    """Bytes of an object that are a shard by themselves."""

    name: str
    start: int
    stop: int
    version: str | None
    """The version of the object when its stream was opened."""
    mask: ShardPart | None = None
    """Bytes of another object that follow these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLocation:
    """Where a stream's files are and how to fetch them: a `Stream`'s arguments and defaults."""

    stream: Any
    """A copy of the `Stream`, with defaults set; the user's object is never modified."""
    folder: Path
    """Folder of its local files: of a remote stream, the remote's own folder in `local`."""
    remote: str | None
    """Its remote folder, including the split; None if that is `local` with the split."""
    temporary_root: Path | None = None
    """The folder under the system's temporary one that was chosen for an unset `local`."""
    own_download: Callable[[str, Path], None] | None = None
    """Fetches one file to a path, by its name, in one attempt: the `_download_file` of a class that
    overrides MosaicML's, or MosaicML's downloader for a store that nothing else reads."""
    parts: Mapping[str, ShardPart] = field(default_factory=dict)
    """The shards that are parts of objects, by name."""

    @classmethod
    def of(cls, stream: Any) -> StreamLocation:
        """Copy the relevant arguments of a `Stream`, ours or MosaicML's, without changing it.

        A ConfigError names the methods that its class overrides, but that are never called here,
        or the library that its remote needs.
        """
        copied, is_theirs = copy.copy(stream), is_mosaicml_stream(stream)
        root = adopt(stream, copied) if is_theirs else _resolve(stream, copied)
        for option, default in DEFAULTS.items():
            if getattr(copied, option, None) is None:
                setattr(copied, option, default)
        copied.safe_keep_zip = copied.keep_zip or copied.remote in (None, copied.local)
        split = copied.split or ""
        remote = copied.remote and os.path.join(copied.remote, split).rstrip("/")
        folder = Path(copied.local, split)
        is_needed = urlsplit(remote or "").scheme in MOSAICML_SCHEMES
        download = own_download(stream, copied, is_needed=is_needed)
        if remote:
            identity = remote_identity(remote)
            if download is None and identity == os.path.realpath(folder):
                remote = None
            else:
                folder = Path(copied.local, remote_digest(identity))
        return cls(
            stream=copied,
            folder=folder,
            remote=remote,
            temporary_root=root,
            own_download=download,
        )

    def uri(self, basename: str) -> str:
        """Return the origin of one of the stream's files, for messages."""
        return os.path.join(self.remote or self.folder, basename)

    @property
    def index_uri(self) -> str:
        """The origin of the stream's index.json, for messages."""
        return self.uri(INDEX_FILE)

    @property
    def identity(self) -> str:
        """The remote in one spelling and without a password; empty if there is none."""
        return "" if self.remote is None else remote_identity(self.remote)

    @property
    def remote_folder(self) -> Path | None:
        """The remote as a folder of this machine; None if it is an object store or unset."""
        folder = None if self.remote is None else folder_of(self.remote)
        return None if folder is None else Path(folder)


def _resolve(stream: Any, copied: Any) -> Path | None:
    defined = [n for n in ("_download_file", *NOT_CALLED) if hasattr(type(stream), n)]
    if defined:
        raise ConfigError(
            f"{type(stream).__name__} defines {', '.join(defined)}, which streampack never calls "
            "on a streampack.Stream; derive the class from streaming.Stream, whose _download_file "
            "may be overridden, or copy the files to where streampack can fetch them"
        )
    if stream.local is not None:
        return None
    try:
        root = private_root()
    except PermissionError as error:
        raise ConfigError(f"local=None: {error}; set local= or TMPDIR") from error
    copied.local = str(root)
    return root


def remote_identity(remote: str) -> str:
    """Return a remote in one spelling and without a password; of a folder, its real path.

    >>> remote_identity("SFTP://me:secret@host/code")
    'sftp://me@host/code'
    """
    folder = folder_of(remote)
    if folder is not None:
        return os.path.realpath(folder)
    return PASSWORD.sub(r"\1", urlsplit(remote).geturl())
