"""Indexes of texts and conversations: rows of lines, and the lengths of all samples.

::

    Texts("s3://bucket/*.jsonl", "tokenizer.json")  -->  out/rows.npz      rows; what follows is of
                                                         out/lengths.npz   lengths, edges, ...

A run with `index=out` then knows all lengths, and tokenizes a text shard only when it reads it.

Cost: that of the tokenizer, over all worker processes; 12 bytes a sample in memory and on disk.
"""

from __future__ import annotations

import os
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import NamedTuple

from streampack._paths import shown_path
from streampack.streams.sources.chats import Chats
from streampack.streams.sources.texts import Texts
from streampack.streams.sources.values import is_path
from streampack.streams.stream import Stream
from streampack.streams.text_lengths import write_lengths_index
from streampack.streams.text_opening import shards_of_texts
from streampack.streams.token_stream import Opening
from streampack.texts.counts import LENGTHS_FILE, write_index
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.units import LINES


class IndexedTexts(NamedTuple):
    """The lengths that were written."""

    path: str
    num_samples: int
    num_tokens: int
    num_shards: int
    """Text shards, each of which was tokenized."""


def write_text_lengths(
    source: Texts | Chats, out: str | os.PathLike[str], *, num_workers: int | None = None
) -> IndexedTexts:
    """Tokenize texts or conversations, and write the lengths of their samples.

    Args:
        source: The texts, as a run has them. Token shards are kept in its `local`; if that is None,
            each is removed once its lengths are known.
        out: Folder or URL, for `index=` of the run.
        num_workers: Processes that tokenize. None: the cores of this machine but one.

    Raises:
        ConfigError: If an option is invalid.
        DataError: If a row cannot become a sample, or a file cannot be read.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "text": 2}, unk_token="?"))
    >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> found = write_text_lengths(Texts(["a text", "", "a"], words), getfixture("tmp_path"))
    >>> found.num_samples, found.num_tokens
    (3, 3)
    """
    to = shown_path(out)
    files = list_inputs([shown_path(source.files)]) if is_path(source.files) else []
    write_index([file for file in files if file.format in LINES], to)
    with TemporaryDirectory(prefix="streampack-") as temporary:
        whole = replace(source, local=source.local or temporary, index=to)
        opening = Opening(stream=Stream(whole), number=0, num_workers=num_workers)
        shards, of = shards_of_texts(whole, opening)
        known = write_lengths_index(shards, to, of, is_kept=source.local is not None)
    return IndexedTexts(
        path=f"{to.rstrip('/')}/{LENGTHS_FILE}",
        num_samples=len(known.lengths),
        num_tokens=int(known.lengths.sum(dtype=int)),
        num_shards=len(shards.table),
    )
