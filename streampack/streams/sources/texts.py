"""`Texts`: rows of text, tokenized once into a cache of the node."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streampack.config.moved import with_known_options
from streampack.streams.sources.values import check_texts
from streampack.streams.text_opening import open_texts
from streampack.streams.token_stream import Opening, TokenStream
from streampack.texts.rows import row_format


@with_known_options
@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Texts that each node tokenizes into its cache, where later runs find them.

    The cache recognizes them by their content, the tokenizer and the options.

    Raises:
        ConfigError: If an option is invalid.

    >>> Texts("s3://bucket/books/*.parquet", "tokenizer.json").text
    'text'
    """

    files: Any
    """The texts: the path of files, a list, a pandas or pyarrow table, or a Hugging Face
    `Dataset`."""
    tokenizer: Any
    """The tokenizer: one of transformers, a `tokenizers.Tokenizer`, or the path of either."""
    local: str | os.PathLike[str] | None = None
    """Cache folder. None: a folder of this user inside the system's temporary folder."""
    text: str = "text"
    """Field of a row that contains the text."""
    special_tokens: Literal["ids", "text"] = "ids"
    """How to encode a special token that a text spells out: "ids", as the id of that token, or
    "text", as ordinary text."""
    backend: Literal["huggingface", "gigatoken"] = "huggingface"
    """Library that encodes the texts: "huggingface", or the faster "gigatoken", which is checked
    against it."""
    only: slice | None = None
    """The samples to use, as a slice of neighbouring ones. None: all."""
    index: str | os.PathLike[str] | None = None
    """Folder or URL that `streampack index` wrote: row counts of JSON lines in a store, and with
    `--tokenizer` the lengths of all samples, which are then tokenized only when they are read."""
    lengths: Literal["eager", "lazy"] | None = None
    """When to tokenize: "eager", everything at the start, or "lazy", while the run reads the texts.
    None: "eager" up to 256 MiB of text."""
    transform: str | Callable[..., Any] | None = None
    """A function that is called with each row and returns the row to use, or nothing to omit it.
    Either "module:function", or a function that other processes can import."""
    version: str = "1"
    """Version of `transform`. Change it whenever the function changes."""
    on_bad_row: Literal["error", "skip"] = "error"
    """How to handle a row that cannot become a sample: raise an "error", or "skip" it and count it
    in a warning."""

    def __post_init__(self) -> None:
        row_format(self, tokenizer=Path())
        check_texts(self)

    def open(self, opening: Opening) -> TokenStream:
        """Tokenize the texts if this node has not yet, and return the stream."""
        return open_texts(self, opening)
