"""Streams from samples and from files of rows, written in parts that can be resumed.

In: samples, or paths of rows and their format. Out: a folder of MDS shards with a length file.
May import `mds`, `stores`, `storage` and `texts`. What was written is measured here, so that no
shard is reread.

Cost: about 10 us a sample, compression, and the tokenizer's time over all cores.
"""

from streampack.write.files import merge, verify, write_texts
from streampack.write.options import WriteOptions, Written
from streampack.write.shards import write_stream

__all__ = [
    "WriteOptions",
    "Written",
    "merge",
    "verify",
    "write_stream",
    "write_texts",
]
