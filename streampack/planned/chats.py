"""`chat_dataset`: conversations in, a dataset of packs out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from streampack.config import Packing
from streampack.errors import ConfigError
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream
from streampack.streams.stream import OF_CHATS


def chat_dataset(
    rows: Any,
    tokenizer: Any,
    *,
    packing: Packing,
    chat: bool | str | Mapping[str, Any] = True,
    name: str | None = None,
    local: str | os.PathLike[str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    **arguments: Any,
) -> PackedStreamingDataset:
    """Return a dataset of conversations, which are tokenized once and kept on this node.

    It is a `PackedStreamingDataset` of one `Stream` of rows. To mix several, pass their streams to
    `PackedStreamingDataset`; the options of conversations go into `Stream(chat={...})` there.

    Args:
        rows: A list, a table of pandas or pyarrow, a `Dataset` of Hugging Face, or the path of
            files.
        tokenizer: A tokenizer of transformers with a chat template, or the path of one.
        packing: How samples share packs. With ``overflow="truncate"``, a conversation that is cut
            before its first target is omitted.
        chat: See `Stream`.
        name: See `Stream`.
        local: See `Stream`.
        on_bad_row: See `Stream`.
        arguments: ``train_on``, ``chat_template``, ``template_kwargs``, ``context_roles`` and
            ``ignore_fields`` of `ChatEncoder`, and other arguments of `PackedStreamingDataset`. A
            trainer sets those of `with_batches` that are left open.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: If a row is not a conversation.
    """
    options = {name: arguments.pop(name) for name in OF_CHATS if name in arguments}
    given = chat if isinstance(chat, Mapping) else {} if chat is True else {"chat": chat}
    if twice := options.keys() & given.keys():
        raise ConfigError(f"{min(twice)}= is also in chat={chat!r}; keep one of them")
    if packing.overflow == "truncate":  # what is cut before its first target is omitted
        options["max_seq_len"] = packing.max_seq_len
    if options:
        chat = {**options, **given}
    stream = Stream(
        rows=rows, tokenizer=tokenizer, chat=chat, name=name, local=local, on_bad_row=on_bad_row
    )
    return PackedStreamingDataset([stream], packing=packing, **arguments)
