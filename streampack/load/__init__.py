"""torch's side: datasets and loaders, ranks, workers, threads."""

from streampack.load.dataset import PackedStreamingDataset
from streampack.load.iterable import PackedIterableDataset
from streampack.load.loader import PackedDataLoader

__all__ = ["PackedDataLoader", "PackedIterableDataset", "PackedStreamingDataset"]
