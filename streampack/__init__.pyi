from streampack.batch.compact import expand
from streampack.batch.loss_weights import loss_weights
from streampack.batch.masks import block_causal_mask
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import (
    ConfigError,
    DataError,
    ResumeError,
    StreampackError,
    WorkerError,
)
from streampack.loader.loader import PackedDataLoader
from streampack.online.bucketed import BucketedIterableDataset
from streampack.online.bucketing import Bucketing
from streampack.online.dataset import PackedIterableDataset
from streampack.planned.dataset import PackedStreamingDataset
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
