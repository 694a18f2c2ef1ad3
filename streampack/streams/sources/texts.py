"""`Texts`: rows of text, tokenized once into a cache of the node."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streampack.config.download import Download
from streampack.config.moved import with_known_options
from streampack.streams.sources.values import check_texts
from streampack.streams.text_opening import open_texts
from streampack.streams.token_stream import Opening, TokenStream
from streampack.texts.rows import row_format


@with_known_options
@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Texts, which the first process of a node tokenizes into a cache; later runs find them there.

    They are known by their content, the tokenizer and the options.

    Raises:
        ConfigError: If an option is invalid.

    >>> Texts("s3://bucket/books/*.parquet", "tokenizer.json").text
    'text'
    """

    files: Any
    """The texts: the path of files, a list, a table of pandas or pyarrow, or a `Dataset` of Hugging
    Face."""
    tokenizer: Any
    """The tokenizer: one of transformers, a `tokenizers.Tokenizer`, or the path of either."""
    local: str | os.PathLike[str] | None = None
    """Folder of the cache. None: a folder of this user inside the system's temporary one."""
    text: str = "text"
    """Field of the text in a row."""
    special_tokens: Literal["ids", "text"] = "ids"
    """What a text that spells a special token gets: its "ids", or those of ordinary "text"."""
    backend: Literal["huggingface", "gigatoken"] = "huggingface"
    """What encodes texts: "huggingface", or "gigatoken", which is faster and compared with it."""
    only: slice | None = None
    """The samples to use, as a slice of neighbouring ones. None: all."""
    index: str | os.PathLike[str] | None = None
    """Folder or URL where `streampack index` wrote the rows of JSON lines of a store, and with its
    `--tokenizer` the lengths of all samples: none of them is tokenized before it is read."""
    lengths: Literal["eager", "lazy"] | None = None
    """When the texts are tokenized: "eager", all at the start, or "lazy", while a run reads
    them. None: "eager" up to 256 MiB of text."""
    transform: str | Callable[..., Any] | None = None
    """A function that returns a row as it should be, or None to omit it: "module:function",
    or a function that other processes can import."""
    version: str = "1"
    """The version of `transform`, to be changed with it."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row that cannot become a sample does: raise an error, or be omitted and counted in a
    warning."""
    download: Download | None = None
    """For files that are fetched whole, and these are read in parts: refused."""

    def __post_init__(self) -> None:
        row_format(self, tokenizer=Path())
        check_texts(self)

    def open(self, opening: Opening) -> TokenStream:
        """Tokenize the texts if this node has not yet, and return the stream."""
        return open_texts(self, opening)
