from streampack.write.chat import ChatEncoder, ChatSamples
from streampack.write.lengths import Indexed, write_lengths
from streampack.write.remote import write_remote_lengths
from streampack.write.rows import RowFormat
from streampack.write.shards import Written, write_stream
from streampack.write.text_files import kind_of, list_files
from streampack.write.tokenize import Progress, WriteOptions, write_texts

__all__ = [
    "ChatEncoder",
    "ChatSamples",
    "Indexed",
    "Progress",
    "RowFormat",
    "WriteOptions",
    "Written",
    "kind_of",
    "list_files",
    "write_lengths",
    "write_remote_lengths",
    "write_stream",
    "write_texts",
]
