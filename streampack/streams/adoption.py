"""MosaicML's `Stream` objects as streams of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streampack.config.download import Download
from streampack.errors import ConfigError
from streampack.storage.location import StreamLocation
from streampack.storage.mosaicml import NOT_CALLED, own_download, temporary_root
from streampack.streams.mds_opening import open_mds
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdoptedShards:
    """The shards of a `streaming.Stream`, fetched by its rules where its class has some."""

    shards: Shards
    location: StreamLocation

    def open(self, opening: Opening) -> TokenStream:
        """Read index.json and the length file, and return the stream."""
        return open_mds(self.shards, self.location, opening)


def adopted(stream: Any) -> Stream:
    """Return a `streaming.Stream` as a stream of ours, without changing it.

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
    return Stream(AdoptedShards(shards=shards, location=location), **weights)


def check_methods(kind: type) -> None:
    """Refuse a class of ours with methods of MosaicML's that are never called."""
    defined = [name for name in ("_download_file", *NOT_CALLED) if hasattr(kind, name)]
    if defined:
        raise ConfigError(
            f"{kind.__name__} defines {', '.join(defined)}, which streampack never calls "
            "on a streampack.Stream; derive the class from streaming.Stream, in which "
            "_download_file may be overridden, or copy the files to where streampack can fetch them"
        )
