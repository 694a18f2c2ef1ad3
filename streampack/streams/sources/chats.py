"""`Chats`: conversations, tokenized with a chat template once into a cache of the node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from streampack.config.moved import with_known_options
from streampack.streams.sources.values import check_texts
from streampack.streams.text_opening import open_texts
from streampack.streams.token_stream import Opening, TokenStream
from streampack.texts.rows import row_format


@with_known_options
@dataclass(frozen=True, slots=True, eq=False)
class Chats:
    """Conversations that each node tokenizes into its cache, where later runs find them.

    Raises:
        ConfigError: If an option is invalid.

    >>> Chats("chats.jsonl", "tokenizer", train_on="last_response").chat
    'messages'
    """

    files: Any
    """The rows: the path of files, a list, a pandas or pyarrow table, or a Hugging Face
    `Dataset`."""
    tokenizer: Any
    """A tokenizer of transformers with a chat template, or the path of one."""
    local: str | os.PathLike[str] | None = None
    """Cache folder. None: a folder of this user inside the system's temporary folder."""
    chat: str = "messages"
    """Field with the conversation, or with the first text of a pair, such as "prompt" or
    "instruction". Rows without this field may have any layout that `ChatEncoder` reads."""
    train_on: Literal["responses", "last_response", "each_response", "all"] = "responses"
    """Targets: the tokens of all "responses", of the "last_response", of "each_response" in a
    sample of its own, or "all" tokens."""
    chat_template: str | None = None
    """A chat template to use instead of the tokenizer's."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the template, with values that JSON can represent."""
    context_roles: Sequence[str] = ()
    """Further roles to treat as context, which is not learned."""
    ignore_fields: Sequence[str] = ()
    """Fields of conversations and messages to ignore."""
    only: slice | None = None
    """The samples to use, as a slice of neighbouring ones. None: all."""
    index: str | os.PathLike[str] | None = None
    """Folder or URL that `streampack index` wrote: row counts of JSON lines in a store, and with
    `--tokenizer` the lengths of all samples, which are then tokenized only when they are read."""
    lengths: Literal["eager", "lazy"] | None = None
    """When to tokenize: "eager", everything at the start, or "lazy", while the run reads the
    conversations. None: "eager" up to 256 MiB of text."""
    transform: str | Callable[..., Any] | None = None
    """A function that is called with each row and returns the row to use, or nothing to omit it.
    Either "module:function", or a function that other processes can import."""
    version: str = "1"
    """Version of `transform`. Change it whenever the function changes."""
    on_bad_row: Literal["error", "skip"] = "error"
    """How to handle a row that is not a conversation: raise an "error", or "skip" it and count it
    in a warning."""

    def __post_init__(self) -> None:
        row_format(self, tokenizer=Path())
        check_texts(self)

    def open(self, opening: Opening) -> TokenStream:
        """Tokenize the conversations if this node has not yet, and return the stream."""
        return open_texts(self, opening)
