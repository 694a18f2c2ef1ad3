from streampack.balance import AttentionCost as AttentionCost
from streampack.balance import Balance as Balance
from streampack.batch.compact import expand as expand
from streampack.batch.loss_weights import loss_weights as loss_weights
from streampack.batch.masks import block_causal_mask as block_causal_mask
from streampack.batch.slices import merge_slices as merge_slices
from streampack.chapters import Chapter as Chapter
from streampack.chapters import Ramp as Ramp
from streampack.config import Bucketing as Bucketing
from streampack.config import Buffers as Buffers
from streampack.config import Mixing as Mixing
from streampack.config import Order as Order
from streampack.config import Packing as Packing
from streampack.errors import ConfigError as ConfigError
from streampack.errors import DataError as DataError
from streampack.errors import ResumeError as ResumeError
from streampack.errors import StreampackError as StreampackError
from streampack.errors import WorkerError as WorkerError
from streampack.loader.loader import PackedDataLoader as PackedDataLoader
from streampack.online.bucketed import BucketedIterableDataset as BucketedIterableDataset
from streampack.online.dataset import PackedIterableDataset as PackedIterableDataset
from streampack.planned.dataset import PackedStreamingDataset as PackedStreamingDataset
from streampack.streams import IterableStream as IterableStream
from streampack.streams import Stream as Stream
from streampack.streams.registry import register_stream as register_stream
from streampack.world import World as World

__version__: str
