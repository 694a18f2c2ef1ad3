"""`Shards`: a stream of shards with an index.json, of MosaicML Streaming or litData."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from streampack.config.download import Download
from streampack.config.moved import with_known_options
from streampack.errors import ConfigError, short_text
from streampack.flat.files import names_token_files
from streampack.storage.location import StreamLocation
from streampack.storage.mosaicml import MOSAICML_SCHEMES, client_of
from streampack.streams.mds_opening import open_mds
from streampack.streams.sources.values import check_source, is_path, read_remote
from streampack.streams.token_stream import Opening, TokenStream

SHARD_FORMATS = ("mds", "litdata")


@with_known_options
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shards:
    """MDS or litData shards, at a remote and/or a local path.

    Raises:
        ConfigError: If the options are invalid or contradict each other.

    >>> Shards(remote="s3://bucket/web", local="/nvme/web").tokens
    'tokens'
    """

    remote: str | os.PathLike[str] | None = None
    """Folder to fetch from: a store's URL, `file://`, or a plain path."""
    local: str | os.PathLike[str] | None = None
    """Folder that caches the files, which several remotes may share. Without a remote, it is the
    stream itself. None: a private folder inside the system's temporary folder, which is reused. `~`
    means this user's home folder, here and in a `remote` that is a plain path."""
    split: str | None = None
    """Subfolder of both `remote` and `local`."""
    format: str | None = None
    """"mds" or "litdata". None: as index.json says."""
    tokens: str = "tokens"
    """Column of the tokens; for the default, "input_ids" is accepted too. If the column is stored
    as `bytes`, add the type of its values to the name: "tokens:uint16"."""
    labels: str | None = None
    """Column of labels, one per token. None: the label of a token is the next token. Without a type
    in the name, labels and loss masks have the type of the tokens."""
    labels_shifted: bool | None = None
    """Whether labels[i] is the target at token i (True), or token i itself or -100 (False). None:
    detect from the first samples."""
    loss_mask: str | None = None
    """Column that marks the targets, 1 or 0 for each token."""
    check_dtypes: bool = True
    """Whether to refuse a type of a `bytes` column if the values contradict it."""
    only: slice | None = None
    """The part of the stream to use: a slice of neighbouring shards. None: all. If shards were
    appended to a stream of n shards, slice(0, n) is the stream as it was."""
    index: str | os.PathLike[str] | None = None
    """Folder that `streampack index --eos-id --out` wrote: where documents end inside rows."""
    split_at: int | None = None
    """Token that ends a document inside a row, if rows are joined documents. Samples are then
    documents, and `index` must have their boundaries."""
    check_remote: bool = False
    """Whether to refetch index.json at every start, and open the version that is in the store now.
    False: open the last version on this disk. If the remote is a folder, its index.json is always
        read."""
    download: Download | None = None
    """How files are fetched, verified and kept. None: `Download()`."""

    def __post_init__(self) -> None:
        if self.remote is None and self.local is None:
            raise ConfigError(
                f"remote={self.remote} and local={self.local}: set one of them to the stream's "
                "folder"
            )
        for name in ("remote", "local", "format"):
            value = getattr(self, name)
            is_fit = value in SHARD_FORMATS if name == "format" else is_path(value)
            if value is not None and (not is_fit or names_token_files(value)):
                raise ConfigError(
                    f"{name}={short_text(value)} is not of shards with an index.json "
                    f"({' or '.join(SHARD_FORMATS)}); token files are a source of their own: "
                    "Stream(TokenFiles(files, format=..., local=...))"
                )
        check_source(self, "shards")
        if self.remote is not None:
            object.__setattr__(self, "remote", read_remote("remote", self.remote))

    def open(self, opening: Opening) -> TokenStream:
        """Read index.json and the length file, and return the stream."""
        return open_mds(self, self.location(), opening)

    def location(self) -> StreamLocation:
        """Return where the files are."""
        location = StreamLocation.of(
            remote=None if self.remote is None else str(self.remote),
            local=None if self.local is None else str(self.local),
            split=self.split or "",
            download=self.download or Download(),
            check_remote=self.check_remote,
        )
        if urlsplit(str(self.remote or "")).scheme not in MOSAICML_SCHEMES:
            return location
        timeout = location.download.timeout
        own = client_of(str(self.remote), str(location.root), location.split, timeout)
        return replace(location, own_download=own)
