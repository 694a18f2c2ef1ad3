"""Rows of the input as samples: the part that runs in several processes.

::

    text           --tokenizer-->      {"tokens": [5, 6, 7]}
    token ids      ----------------->  {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}
    conversation   --ChatEncoder---->  {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}, ...

This module does not import torch, so a process starts in a fraction of a second.

Cost: the tokenizer's, about 1 to 5 MB/s per process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from streampack._checks import check_choice, convert_fields, read_json_object
from streampack.errors import ConfigError, DataError, short_text
from streampack.mds.encoder import SCALARS
from streampack.mds.length_file import NO_TOKEN
from streampack.texts.chat import ChatEncoder, TrainOn, check_chat_options
from streampack.texts.inputs.slices import RowBatch
from streampack.texts.inputs.values import RowSelection
from streampack.texts.samples import SampleSchema
from streampack.texts.tokenization import (
    CONFIG_FILE,
    Backend,
    SpecialTokens,
    load_tokenizer,
    special_ids_of,
    text_encoder,
    tokenizer_file,
)
from streampack.types import IntArray

MAX_TEXT_BYTES = 64 << 20
LOSS_MASK = "loss_mask"  # the column that a ChatEncoder adds
OF_CHATS = tuple(each.name for each in fields(ChatEncoder)[1:])
UNSET: tuple[Any, ...] = (None, "responses", (), {})
CHAT_FILES = (CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """The contents of a row, and its conversion to tokens."""

    tokenizer: Path | None = None
    """A tokenizer.json, or the folder of a tokenizer of transformers, or None for token ids."""
    text: str = "text"
    """Field of the text."""
    tokens: str = "tokens"
    """Field of the token ids, without a tokenizer. For the default, "input_ids" is accepted too."""
    chat: str | None = None
    """Field of the conversation, such as "messages", or of the first text of a pair, "prompt" or
    "instruction"; in rows without it, any that a `ChatEncoder` reads."""
    columns: tuple[str, ...] = ()
    """Fields that are kept, each in a column: "url", or with an MDS encoding, "hash:uint64". "json"
    takes any value, null too. A list of one integer per token (a loss mask) becomes an array."""
    backend: Backend = "huggingface"
    """What encodes texts: "huggingface", or "gigatoken", which is faster and compared with it."""
    train_on: TrainOn = "responses"
    """Targets of conversations: "responses", "last_response", "each_response" or "all"."""
    chat_template: str | None = None
    """A chat template to use instead of the tokenizer's."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More arguments of the template, of types that JSON has."""
    context_roles: Sequence[str] = ()
    """More roles of conversations that are not learned."""
    ignore_fields: Sequence[str] = ()
    """Fields of conversations and their messages that are as if they were not there."""
    max_seq_len: int | None = None
    """Tokens that a conversation is cut to; without a target in them, it is omitted."""
    special_tokens: SpecialTokens = "ids"
    """What a text that spells a special token gets: its "ids", or those of ordinary "text"."""

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, Backend)
        check_choice("special_tokens", self.special_tokens, SpecialTokens)
        convert_fields(self, read_json_object, "template_kwargs")
        check_chat_options(self)
        for name in ("context_roles", "ignore_fields"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        is_exact = self.encodes_text and self.backend == "huggingface"
        if self.special_tokens == "text" and not is_exact:
            raise ConfigError(
                "special_tokens='text' is for texts that backend='huggingface' encodes; omit it, "
                "or set tokenizer= without chat= and backend="
            )
        if self.backend != "huggingface" and not self.encodes_text:
            raise ConfigError(
                f"backend={self.backend!r} encodes texts, and these rows are "
                f"{'token ids' if self.chat is None else 'conversations'}; omit it"
            )
        if self.chat is None:
            for name in OF_CHATS:
                if (value := getattr(self, name)) not in UNSET:
                    raise ConfigError(
                        f"{name}={short_text(value)} is for conversations; name their column with "
                        "chat=, or omit it"
                    )

    @property
    def kept(self) -> dict[str, str | None]:
        """The encodings of the fields that are kept, by name, or None to see the first rows."""
        kept: dict[str, str | None] = {}
        for column in self.columns:
            name, _, encoding = column.rpartition(":")
            is_typed = bool(name) and encoding in SCALARS
            kept[name if is_typed else column] = encoding if is_typed else None
        return kept

    @property
    def selection(self) -> RowSelection:
        """The columns that are read."""
        option = "chat" if self.chat is not None else "text" if self.tokenizer else "tokens"
        return RowSelection(option, getattr(self, option), tuple(self.kept))

    @property
    def encodes_text(self) -> bool:
        """Whether a row is a text."""
        return self.tokenizer is not None and self.chat is None


def row_format(source: Any, **own: Any) -> RowFormat:
    """Return the format of the options that an object has; `own` replace some.

    >>> from types import SimpleNamespace
    >>> row_format(SimpleNamespace(text="body", files="a.jsonl"), tokenizer=Path()).text
    'body'
    """
    names = [field.name for field in fields(RowFormat)]
    return RowFormat(
        **{name: getattr(source, name) for name in names if hasattr(source, name)} | own
    )


def tokenizer_digest(rows: RowFormat) -> str | None:
    """Return a digest of the files that token ids depend on; None without a tokenizer."""
    if rows.tokenizer is None:
        return None
    load_tokenizer(rows.tokenizer)  # refused before anything is written
    file = tokenizer_file(rows.tokenizer)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16)
    if rows.chat is not None:
        for name in CHAT_FILES:
            path = file.with_name(name)
            digest.update(path.read_bytes() if path.is_file() else b"")
        for path in sorted(file.parent.glob(NAMED_TEMPLATES)):
            digest.update(f"{path.name} ".encode() + path.read_bytes())
    return digest.hexdigest()


class RowEncoder:
    """Turns rows into samples of a schema; refuses another tokenizer than that of `digest`."""

    def __init__(self, rows: RowFormat, schema: SampleSchema, digest: str | None) -> None:
        if tokenizer_digest(rows) != digest:
            raise ConfigError(
                f"tokenizer={str(rows.tokenizer)!r} has changed since the job began, or differs "
                "on this machine; restore it, or start again (streampack write: in another folder)"
            )
        self._schema = schema
        self._dtype = np.dtype(schema.dtype)
        self._limit = min(int(np.iinfo(self._dtype).max), NO_TOKEN - 1)
        self._texts = self._chat = None
        self.is_chat = rows.chat is not None
        if rows.chat is not None:
            self._chat = _chat_encoder(rows, digest)
        elif rows.tokenizer is not None:
            self._texts = text_encoder(rows.tokenizer, rows.backend, rows.special_tokens)
            self._special_ids = special_ids_of(load_tokenizer(rows.tokenizer))
        self.num_special_tokens = 0  # in the texts so far

    def encode(self, batch: RowBatch) -> list[list[dict[str, Any] | None] | str]:
        """Return the samples of each row, or why it is bad; None is a sample without tokens.

        Shape (num_rows,). A row has one sample, and a conversation one or more.
        """
        kept = [
            dict(zip(batch.kept, row, strict=True))
            for row in zip(*batch.kept.values(), strict=True)
        ]
        kept = kept or [{} for _ in batch.values]
        if self._texts is not None:
            # A character has 4 bytes at most.
            if max(map(len, batch.values), default=0) <= MAX_TEXT_BYTES // 4:
                ids = self._texts(batch.values)
            else:
                ids = [_too_long(text) or self._texts([text])[0] for text in batch.values]
            return [self._from_text(*each) for each in zip(ids, kept, strict=True)]
        return [self._from_row(*each) for each in zip(batch.values, kept, strict=True)]

    def _from_text(self, tokens: IntArray | str, kept: dict[str, Any]) -> Any:
        if isinstance(tokens, str):
            return tokens
        if not len(tokens):
            return [None]
        most = int(tokens.max())
        ids = self._special_ids
        if len(ids) and most >= ids[0]:
            near = tokens[(tokens >= ids[0]) & (tokens <= ids[-1])]  # so that few are looked up
            self.num_special_tokens += int(np.isin(near, ids).sum()) if len(near) else 0
        if most > self._limit:
            return f"token id {most} exceeds {self._limit} of {self._dtype}; omit tokens_dtype="
        return [{self._schema.column: tokens.astype(self._dtype), **kept}]

    def _from_row(self, value: Any, kept: dict[str, Any]) -> Any:
        try:
            samples = self._chat.samples(value) if self._chat else [{"tokens": value}]
            renamed = [{self._schema.column: each.pop("tokens"), **each} for each in samples]
            return [self._schema.fit({**each, **kept}) for each in renamed]
        except (DataError, ValueError) as error:
            return str(error)


def _too_long(text: str) -> str:
    """Return why a text may not be tokenized, or nothing."""
    size = len(text.encode(errors="surrogatepass"))
    if size <= MAX_TEXT_BYTES:
        return ""
    return f"has {size} bytes of text, but may have {MAX_TEXT_BYTES}; split it"


@lru_cache(maxsize=2)
def _chat_encoder(rows: RowFormat, digest: str | None) -> ChatEncoder:  # noqa: ARG001 - the key
    if rows.tokenizer is None:
        raise ConfigError(
            f"chat={rows.chat!r} needs a tokenizer with a chat template; set "
            "tokenizer= to the folder that its save_pretrained() wrote"
        )
    folder = tokenizer_file(rows.tokenizer).parent
    try:
        # transformers takes a second to import, which other jobs need not wait for.
        loaded = import_module("transformers").AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # it raises many kinds
        raise ConfigError(
            f"tokenizer={str(rows.tokenizer)!r} cannot be loaded for chats "
            f"({type(error).__name__}: {error!s:.200}); give the folder that a tokenizer's "
            "save_pretrained() wrote, and install transformers"
        ) from error
    return ChatEncoder(loaded, **{name: getattr(rows, name) for name in OF_CHATS})
