"""Weighted token streams in, full packs out: mixed and packed on the fly, resumed exactly.

::

    streams ---> mix ---> order ---> pack ---> plan ---> read ---> assemble ---> load

The public names are here. The configs and errors come with the package; whatever needs torch comes
at its first use, so that importing streampack costs milliseconds.

Cost: about 10 ms; torch, streaming and numba are loaded with the first dataset or stream.
"""

from __future__ import annotations

from importlib import import_module

from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import (
    ConfigError,
    DataError,
    ResumeError,
    StreampackError,
    WorkerError,
)
from streampack.world import World

__all__ = [
    "BucketedIterableDataset",
    "Bucketing",
    "Buffers",
    "ConfigError",
    "DataError",
    "IterableStream",
    "Mixing",
    "Order",
    "PackedDataLoader",
    "PackedIterableDataset",
    "PackedStreamingDataset",
    "Packing",
    "ResumeError",
    "Stream",
    "StreampackError",
    "WorkerError",
    "World",
    "block_causal_mask",
    "expand",
    "loss_weights",
]

__version__ = "0.1.0"

# Which room holds a name that needs torch. The stub beside this file says the same to editors.
_LATE = {
    "BucketedIterableDataset": "streampack.load",
    "Bucketing": "streampack.load",
    "IterableStream": "streampack.streams",
    "PackedDataLoader": "streampack.load",
    "PackedIterableDataset": "streampack.load",
    "PackedStreamingDataset": "streampack.load",
    "Stream": "streampack.streams",
    "block_causal_mask": "streampack.assemble",
    "expand": "streampack.assemble",
    "loss_weights": "streampack.assemble",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
