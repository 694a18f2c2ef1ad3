"""Where the files of a stream are, and how they are fetched."""

from __future__ import annotations

from typing import Any

from streampack import Download
from streampack.storage.location import StreamLocation
from streampack.storage.mosaicml import is_mosaicml_stream
from streampack.streams.opening import adopted

DOWNLOAD = ("retry", "timeout", "hash", "keep_zip")


def location_of(stream: Any) -> StreamLocation:
    """Return the location of a stream, ours or MosaicML's."""
    if is_mosaicml_stream(stream):
        return adopted(stream)[1]
    location: StreamLocation = stream.source.location()
    return location


def with_download(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a stream, with those of its `Download` in it."""
    own = {name: options[name] for name in DOWNLOAD if name in options}
    others = {name: value for name, value in options.items() if name not in DOWNLOAD}
    return others | ({"download": Download(**own)} if own else {})
