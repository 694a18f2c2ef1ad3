"""torch's side: datasets and loaders, ranks, workers, threads."""

from streampack.load.bucketed import BucketedIterableDataset
from streampack.load.buckets import Bucketing
from streampack.load.dataset import PackedStreamingDataset
from streampack.load.iterable import PackedIterableDataset
from streampack.load.loader import PackedDataLoader

__all__ = [
    "BucketedIterableDataset",
    "Bucketing",
    "PackedDataLoader",
    "PackedIterableDataset",
    "PackedStreamingDataset",
]
