"""streams: bytes at rest, and their lengths."""

from streampack.streams.index import MdsIndex, parse_index
from streampack.streams.iterable import IterableSample, IterableStream
from streampack.streams.lengths import LENGTH_FILE, LengthFile, open_length_file, write_length_file
from streampack.streams.mds import Places
from streampack.streams.opened import OpenStream, open_stream, open_streams
from streampack.streams.recent import OpenShard
from streampack.streams.stream import Stream

__all__ = [
    "LENGTH_FILE",
    "IterableSample",
    "IterableStream",
    "LengthFile",
    "MdsIndex",
    "OpenShard",
    "OpenStream",
    "Places",
    "Stream",
    "open_length_file",
    "open_stream",
    "open_streams",
    "parse_index",
    "write_length_file",
]
