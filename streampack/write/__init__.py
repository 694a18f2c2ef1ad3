"""write: create streams and their length files; not part of the data path of training."""

from streampack.write.chat import ChatEncoder, ChatSamples
from streampack.write.files import merge, verify, write_texts
from streampack.write.lengths import Indexed, write_lengths
from streampack.write.options import JobProgress, WriteOptions, Written
from streampack.write.rows import RowFormat
from streampack.write.shards import write_stream

__all__ = [
    "ChatEncoder",
    "ChatSamples",
    "Indexed",
    "JobProgress",
    "RowFormat",
    "WriteOptions",
    "Written",
    "merge",
    "verify",
    "write_lengths",
    "write_stream",
    "write_texts",
]
