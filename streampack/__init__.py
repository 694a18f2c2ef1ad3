"""Weighted token streams in, full packs out: mixed and packed on the fly, resumed exactly.

::

    streams ---> mix ---> order ---> pack ---> plan ---> gather ---> batch ---> loader

The public names are defined here. Configs and errors are imported with the package. Names that need
torch are imported at first use, so that importing streampack stays cheap.

Cost: about 10 ms; torch and numba are imported with the first dataset or stream.
"""

from __future__ import annotations

from importlib import import_module

from streampack.config import (
    Bucketing,
    Buffers,
    Download,
    HeldOut,
    Mixing,
    Order,
    PackCost,
    Packing,
)
from streampack.errors import ConfigError, DataError, ResumeError, StreampackError, WorkerError
from streampack.world import World

__all__ = [
    "AttentionCost",
    "Balance",
    "BucketedIterableDataset",
    "Bucketing",
    "Buffers",
    "Chapter",
    "Chats",
    "ConfigError",
    "DataError",
    "Download",
    "HeldOut",
    "IterableStream",
    "Mixing",
    "Order",
    "PackCost",
    "PackedDataLoader",
    "PackedIterableDataset",
    "PackedStreamingDataset",
    "Packing",
    "Payloads",
    "Ramp",
    "ResumeError",
    "Shards",
    "Stream",
    "StreampackError",
    "Texts",
    "TokenFiles",
    "WorkerError",
    "World",
    "at",
    "block_causal_mask",
    "by_stream",
    "chat_dataset",
    "chat_datasets",
    "expand",
    "from_config",
    "loss_weights",
    "merge_slices",
    "register_source",
    "register_stream",
    "where",
]

__version__ = "0.2.0"

# Module of each name that needs numpy or torch. The stub next to this file tells editors the same.
_LATE = {
    "AttentionCost": "streampack.balance",
    "Balance": "streampack.balance",
    "BucketedIterableDataset": "streampack.online.dataset",
    "Chapter": "streampack.chapters",
    "Chats": "streampack.streams.sources.chats",
    "IterableStream": "streampack.streams",
    "PackedDataLoader": "streampack.loader.loader",
    "PackedIterableDataset": "streampack.online.dataset",
    "PackedStreamingDataset": "streampack.planned.dataset",
    "Payloads": "streampack.streams",
    "Ramp": "streampack.chapters",
    "Shards": "streampack.streams.sources.shards",
    "Stream": "streampack.streams",
    "Texts": "streampack.streams.sources.texts",
    "TokenFiles": "streampack.streams.sources.token_files",
    "at": "streampack.lookback.at",
    "block_causal_mask": "streampack.batch.masks",
    "by_stream": "streampack.runtime.provenance",
    "chat_dataset": "streampack.planned.chats",
    "chat_datasets": "streampack.planned.chats",
    "expand": "streampack.batch.compact",
    "from_config": "streampack.cli.build",
    "loss_weights": "streampack.batch.loss_weights",
    "merge_slices": "streampack.batch.slices",
    "register_source": "streampack.streams.registry",
    "register_stream": "streampack.streams.registry",
    "where": "streampack.lookback.where",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
