"""Streams as the user sees them: options, columns, sample lengths and open shards.

In: `Stream` and `IterableStream` objects. Out: a `TokenStream`, which reports sample lengths
and maps shards, and samples of iterables. May import `mds`, `flat`, `texts`, `write` and `storage`.
No sample is chosen here.

Cost: opening a stream with a length file takes milliseconds, whatever its size.
"""

from streampack.streams.iterable_stream import IterableSample, IterableStream, Payloads
from streampack.streams.opening import open_stream, open_streams
from streampack.streams.shard_pool import OpenShard
from streampack.streams.stream import Stream
from streampack.streams.token_stream import TokenStream

__all__ = [
    "IterableSample",
    "IterableStream",
    "OpenShard",
    "Payloads",
    "Stream",
    "TokenStream",
    "open_stream",
    "open_streams",
]
