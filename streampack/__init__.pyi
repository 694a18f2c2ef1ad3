from streampack.assemble import block_causal_mask, expand, loss_weights
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import (
    ConfigError,
    DataError,
    ResumeError,
    StreampackError,
    WorkerError,
)
from streampack.load import (
    BucketedIterableDataset,
    Bucketing,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
)
from streampack.streams import IterableStream, Stream
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
__version__: str
