"""`chat_dataset`: conversations in, a dataset of packs out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from streampack.config import Packing
from streampack.config.held_out import HeldOut
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream
from streampack.streams.sources.chats import Chats


def chat_dataset(
    rows: Any,
    tokenizer: Any,
    *,
    packing: Packing,
    name: str | None = None,
    held_out: HeldOut | None = None,
    **arguments: Any,
) -> PackedStreamingDataset:
    """Return a dataset of conversations, which are tokenized once and kept on this node.

    It is a `PackedStreamingDataset` of one ``Stream(Chats(...))``. To mix several, pass their
    streams to `PackedStreamingDataset`.

    Args:
        rows: A list, a pandas or pyarrow table, a Hugging Face `Dataset`, or the path of files.
        tokenizer: A tokenizer of transformers with a chat template, or the path of one.
        packing: How samples share packs. With ``overflow="truncate"``, a conversation that is cut
            before its first target is omitted.
        name: See `Stream`.
        held_out: See `Stream`; `chat_datasets` returns both sides.
        arguments: Options of `Chats`, such as ``train_on``, and of `PackedStreamingDataset`.
            Arguments of `with_batches` that are left open are set by the trainer.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: If a row is not a conversation.
    """
    names = {field.name for field in fields(Chats)} & arguments.keys()
    source = Chats(rows, tokenizer, **{option: arguments.pop(option) for option in names})
    stream = Stream(source, name=name, held_out=held_out)
    return PackedStreamingDataset([stream], packing=packing, **arguments)


def chat_datasets(
    rows: Any, tokenizer: Any, *, held_out: float, **arguments: Any
) -> tuple[PackedStreamingDataset, PackedStreamingDataset]:
    """Return a dataset to train on and a held-out one, of the same conversations.

    Args:
        rows: See `chat_dataset`.
        tokenizer: See `chat_dataset`.
        held_out: The share of the conversations that is held out, such as 0.05.
        arguments: Further arguments of `chat_dataset`, for both.

    Raises:
        ConfigError: If the arguments cannot work together, or one side has no conversation.
        DataError: If a row is not a conversation.
    """
    train, held = (
        chat_dataset(rows, tokenizer, held_out=HeldOut(side, held_out, by="row"), **arguments)
        for side in ("train", "held_out")
    )
    return train, held
