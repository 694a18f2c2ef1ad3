"""Rows as others stored them: texts, conversations and token ids.

In: files, lists and tables of rows, and a tokenizer. Out: arrays of token ids for each sample, with
a loss mask of a conversation, or why a row is bad. May import `mds`, `stores` and `storage`.
Written are counts, rows of memory and token shards, into a cache; torch is not imported.

Cost: the tokenizer's, about 1 to 5 MB/s per process; conversations depend on the chat template.
"""

from streampack.texts.chat import ChatEncoder, ChatSamples
from streampack.texts.rows import RowFormat

__all__ = ["ChatEncoder", "ChatSamples", "RowFormat"]
