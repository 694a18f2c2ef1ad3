from streampack.assemble import block_causal_mask, loss_weights
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError, DataError, ResumeError, StreampackError
from streampack.load import PackedDataLoader, PackedIterableDataset, PackedStreamingDataset
from streampack.streams import IterableStream, Stream
from streampack.world import World

__all__ = [
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
    "World",
    "block_causal_mask",
    "loss_weights",
]
__version__: str
