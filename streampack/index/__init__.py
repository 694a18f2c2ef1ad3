"""What streams of others lack: length files of shards, indexes of token files, lengths of texts.

In: folders, files or URLs of streams. Out: a length file next to each index.json, or files in a
folder of the user's choice. May import `streams` and every room before it. Streams that `write`
made have all of it.

Cost: one read of the tokens, and their hash, or their tokenizer; 12 or 20 bytes a sample on disk.
"""

from streampack.index.lengths import Indexed, write_lengths
from streampack.index.text_lengths import IndexedTexts, write_text_lengths

__all__ = ["Indexed", "IndexedTexts", "write_lengths", "write_text_lengths"]
