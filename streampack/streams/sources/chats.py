"""`Chats`: conversations, tokenized with a chat template once into a cache of the node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
class Chats:
    """Conversations, which the first process of a node tokenizes into a cache, for later runs too.

    Raises:
        ConfigError: If an option is invalid.

    >>> Chats("chats.jsonl", "tokenizer", train_on="last_response").chat
    'messages'
    """

    files: Any
    """The rows: the path of files, a list, a table of pandas or pyarrow, or a `Dataset` of Hugging
    Face."""
    tokenizer: Any
    """A tokenizer of transformers with a chat template, or the path of one."""
    local: str | os.PathLike[str] | None = None
    """Folder of the cache. None: a folder of this user inside the system's temporary one."""
    chat: str = "messages"
    """Field of the conversation, or of the first text of a pair, "prompt" or "instruction"; in rows
    without it, any that a `ChatEncoder` reads."""
    train_on: Literal["responses", "last_response", "each_response", "all"] = "responses"
    """Targets: "responses", "last_response", "each_response", which makes a sample of each, or
    "all"."""
    chat_template: str | None = None
    """A chat template to use instead of the tokenizer's."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the template, of types that JSON has."""
    context_roles: Sequence[str] = ()
    """More roles that are not learned."""
    ignore_fields: Sequence[str] = ()
    """Fields of conversations and their messages that are as if they were not there."""
    only: slice | None = None
    """The samples to use, as a slice of neighbouring ones. None: all."""
    index: str | os.PathLike[str] | None = None
    """Folder or URL where `streampack index` wrote the rows of JSON lines of a store, and with its
    `--tokenizer` the lengths of all samples: none of them is tokenized before it is read."""
    lengths: Literal["eager", "lazy"] | None = None
    """When the conversations are tokenized: "eager", all at the start, or "lazy", while a run reads
    them. None: "eager" up to 256 MiB of text."""
    transform: str | Callable[..., Any] | None = None
    """A function that returns a row as it should be, or None to omit it: "module:function",
    or a function that other processes can import."""
    version: str = "1"
    """The version of `transform`, to be changed with it."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row that is not a conversation does: raise an error, or be omitted and counted in a
    warning."""
    download: Download | None = None
    """For files that are fetched whole, and these are read in parts: refused."""

    def __post_init__(self) -> None:
        row_format(self, tokenizer=Path())
        check_texts(self)

    def open(self, opening: Opening) -> TokenStream:
        """Tokenize the conversations if this node has not yet, and return the stream."""
        return open_texts(self, opening)
