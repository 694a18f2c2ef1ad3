"""`Stream`: a source of samples, its weight, and what a run does with its samples.

Nothing is read here. The object keeps what the user said, and streampack never modifies it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from typing import Any, Protocol, TypedDict, Unpack

from streampack._checks import (
    check_choice,
    is_weight,
    read_optional_count,
    read_token_id,
    show_number,
)
from streampack.config.download import Download
from streampack.config.held_out import HeldOut
from streampack.config.moved import check_options
from streampack.config.packing import Overflow
from streampack.errors import ConfigError, short_text
from streampack.streams.sources.shards import Shards


class Source(Protocol):
    """Where samples are, and what a sample is: `Shards`, `TokenFiles`, `Texts`, `Chats`, or yours.

    What `open` returns has the shards: `docs/sources.md` shows a source of others.
    """

    def open(self, opening: Any, /) -> Any:
        """Return the opened shards; `opening` says for which stream."""


class ShardOptions(TypedDict, total=False):
    """The options of `Shards`, for the short form of a `Stream`."""

    remote: str | os.PathLike[str] | None
    local: str | os.PathLike[str] | None
    split: str | None
    format: str | None
    tokens: str
    labels: str | None
    labels_shifted: bool | None
    loss_mask: str | None
    check_dtypes: bool
    only: slice | None
    index: str | os.PathLike[str] | None
    split_at: int | None
    check_remote: bool
    download: Download | None


class Stream:
    """A weighted source of samples.

    Args:
        source: Where the samples are and what a sample is: `Shards`, `TokenFiles`, `Texts`,
            `Chats`, or a source of your own. None: `Shards` made from the other arguments.
        name: Name of the stream in messages and reports. None: the last part of its path.
        proportion: Share of an epoch, relative to the other streams. At most one of proportion,
            repeat and choose may be set; without them, an epoch takes each sample once.
        repeat: Number of times that an epoch takes each sample.
        choose: Number of samples (or tokens, by weight_unit) that an epoch takes.
        loss_weight: Factor for the losses of this stream's tokens, whatever its share. None: 1.
            Batches have it in the formats in which you or streampack weigh the loss: see
            `loss_weights`.
        max_seq_len: Tokens per pack of this stream. None: as in `Packing`. It must be a multiple of
            `Packing.max_seq_len` that divides the tokens of a device batch, and needs the batching
            method "device_per_stream" or "per_stream". A batch of this stream then has fewer,
            longer rows, and as many tokens.
        overflow: Handling of samples of this stream that are longer than a pack, as in `Packing`.
            With "truncate", conversations that are cut before their first target are omitted.
        bos_id: Token inserted before each sample of this stream that does not start with it. None,
            here and below: as in `Packing`.
        eos_id: Token appended to each sample of this stream that does not end with it.
        held_out: The side of a held-out split to use. None: all samples.
        shards: Options of `Shards`: ``Stream(remote=..., local=...)`` is short for
            ``Stream(Shards(remote=..., local=...))``.

    Raises:
        ConfigError: If the arguments are invalid or contradict each other.

    >>> Stream(local="data/code", proportion=0.7).source.local
    'data/code'
    """

    def __init__(  # noqa: PLR0913 - MosaicML's arguments, under their names
        self,
        source: Source | None = None,
        /,
        *,
        name: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        loss_weight: float | None = None,
        max_seq_len: int | None = None,
        overflow: Overflow | None = None,
        bos_id: int | None = None,
        eos_id: int | None = None,
        held_out: HeldOut | None = None,
        **shards: Unpack[ShardOptions],
    ) -> None:
        check_options("Stream", shards, [*OPTIONS, *ShardOptions.__annotations__])
        if source is None:
            source = Shards(**shards)
        elif shards:
            given, value = next(iter(shards.items()))
            raise ConfigError(
                f"{given}={short_text(value)} is an option of Shards, but the stream already has a "
                f"{type(source).__name__}; set the option there, or omit one of them"
            )
        elif not callable(getattr(source, "open", None)):
            raise ConfigError(
                f"source={short_text(source)} is not a source; pass Shards(remote=...), "
                "TokenFiles(files), Texts(files, tokenizer) or Chats(files, tokenizer)"
            )
        if held_out is not None and not isinstance(held_out, HeldOut):
            raise ConfigError(
                f"held_out={short_text(held_out)} is not a HeldOut; write "
                "HeldOut('train', 0.005, by='shard'), for example"
            )
        if loss_weight is not None and not is_weight(loss_weight):
            raise ConfigError(
                f"loss_weight={loss_weight!r:.40} is not a number of 0 or more; write a factor, "
                "such as 0.5"
            )
        if overflow is not None:
            check_choice("overflow", overflow, Overflow)
        _check_weights({"proportion": proportion, "repeat": repeat, "choose": choose})
        self.source: Any = source
        self.name = name
        self.proportion, self.repeat, self.choose = proportion, repeat, choose
        self.loss_weight = loss_weight
        self.max_seq_len = read_optional_count("max_seq_len", max_seq_len)
        self.overflow = overflow
        self.bos_id = read_token_id("bos_id", bos_id)
        self.eos_id = read_token_id("eos_id", eos_id)
        self.held_out = held_out

    def __repr__(self) -> str:
        stated = {key: value for key, value in vars(self).items() if value is not None}
        source = stated.pop("source")
        options = ", ".join(f"{key}={value!r}" for key, value in stated.items())
        return f"{type(self).__name__}({source!r:.200}{', ' * bool(options)}{options})"


OPTIONS = tuple(signature(Stream).parameters)[1:-1]
"""The options of a `Stream`, without its source."""


def _check_weights(weights: Mapping[str, Any]) -> None:
    weights = {name: value for name, value in weights.items() if value is not None}
    stated = ", ".join(f"{name}={show_number(value)}" for name, value in weights.items())
    if len(weights) > 1:
        raise ConfigError(f"{stated}: a stream has at most one of them; keep one")
    for value in weights.values():
        if not is_weight(value):
            raise ConfigError(
                f"{stated}: a weight must be a number of at least 0; 0 omits the stream"
            )
