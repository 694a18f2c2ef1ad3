"""The location of a stream's files, local and remote.

::

    Shards(remote, local, split, ...) --> StreamLocation --> download.py, cache.py
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streampack._paths import folder_of, real_path
from streampack.config.download import Download
from streampack.errors import ConfigError
from streampack.mds.index import INDEX_FILE
from streampack.storage.filesystem import LocalFilesystem, is_own_folder
from streampack.storage.names import remote_digest

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
    """Where the files of a stream are, and how to fetch them."""

    folder: Path
    """Folder of its local files: of a remote stream, the remote's own folder in `root`."""
    remote: str | None
    """Its remote folder, including the split; None if that is `root` with the split."""
    root: Path
    """The folder that was named, or chosen, for its local files."""
    split: str = ""
    download: Download = field(default_factory=Download)
    check_remote: bool = False
    """Whether to ask for index.json again at every start."""
    temporary_root: Path | None = None
    """The folder under the system's temporary one that was chosen for an unset `local`."""
    own_download: Callable[[str, Path], None] | None = None
    """Fetches one file to a path, by its name, in one attempt: the `_download_file` of a class that
    overrides MosaicML's, or MosaicML's downloader for a store that nothing else reads."""
    parts: Mapping[str, ShardPart] = field(default_factory=dict)
    """The shards that are parts of objects, by name."""

    @classmethod
    def of(
        cls, *, remote: str | None = None, local: str | None = None, split: str = "", **options: Any
    ) -> StreamLocation:
        """Return the location of a folder and its copies; `options` are further fields.

        Raises:
            ConfigError: If an unset `local` has no folder of this user.
        """
        root = default_root() if local is None else Path(local)
        if local is None:
            options["temporary_root"] = root
        folder = root / split
        remote = remote and os.path.join(remote, split).rstrip("/")
        if remote:
            identity = remote_identity(remote)
            if options.get("own_download") is None and identity == real_path(folder):
                remote = None
            else:
                folder = root / remote_digest(identity)
        return cls(folder=folder, remote=remote or None, root=root, split=split, **options)

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


def default_root() -> Path:
    """Return the folder of this user for an unset `local`, or raise a ConfigError.

    It may not exist yet. It is the same in all processes.
    """
    root = Path(tempfile.gettempdir(), f"streampack-{os.getuid()}")
    if not is_own_folder(root):
        raise ConfigError(
            f"local=None: {root} belongs to another user, or is a link; set local= or TMPDIR"
        )
    return root


def cache_root(local: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the folder for files that are made here of rows: `local`, or one of this user."""
    if local is not None:
        return Path(real_path(local))
    root = Path(real_path(default_root()))
    LocalFilesystem().make_folder(root, is_private=True)
    return root / name


def remote_identity(remote: str) -> str:
    """Return a remote in one spelling and without a password; of a folder, its real path.

    >>> remote_identity("SFTP://me:secret@host/code")
    'sftp://me@host/code'
    """
    folder = folder_of(remote)
    if folder is not None:
        return real_path(folder)
    return PASSWORD.sub(r"\1", urlsplit(remote).geturl())
