"""Weighted token streams in, full packs out: mixed and packed on the fly, resumed exactly.

::

    streams ---> mix ---> order ---> pack ---> plan ---> gather ---> batch ---> loader

The public names are defined here, and imported at first use, so that importing streampack stays
cheap.

Cost: about 3 ms; torch and numba are imported with the first dataset or stream.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.2.0"

# Module of each public name. The stub next to this file tells editors the same.
_LATE = {
    "AttentionCost": "streampack.balance",
    "Balance": "streampack.balance",
    "BucketedIterableDataset": "streampack.online.dataset",
    "Bucketing": "streampack.config",
    "Buffers": "streampack.config",
    "Chapter": "streampack.chapters",
    "Chats": "streampack.streams.sources.chats",
    "ConfigError": "streampack.errors",
    "DataError": "streampack.errors",
    "Download": "streampack.config",
    "HeldOut": "streampack.config",
    "IterableStream": "streampack.streams",
    "Mixing": "streampack.config",
    "Order": "streampack.config",
    "PackCost": "streampack.config",
    "PackedDataLoader": "streampack.loader.loader",
    "PackedIterableDataset": "streampack.online.dataset",
    "PackedStreamingDataset": "streampack.planned.dataset",
    "Packing": "streampack.config",
    "Payloads": "streampack.streams",
    "Ramp": "streampack.chapters",
    "ResumeError": "streampack.errors",
    "Shards": "streampack.streams.sources.shards",
    "Stream": "streampack.streams",
    "StreampackError": "streampack.errors",
    "Texts": "streampack.streams.sources.texts",
    "TokenFiles": "streampack.streams.sources.token_files",
    "WorkerError": "streampack.errors",
    "World": "streampack.world",
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
__all__ = list(_LATE)


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
