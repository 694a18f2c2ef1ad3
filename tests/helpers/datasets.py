"""Datasets from names of streams, options of each stream, and options of the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streampack import (
    BucketedIterableDataset,
    IterableStream,
    PackedIterableDataset,
    PackedStreamingDataset,
    Stream,
)

Options = Mapping[str, Any]


def planned_dataset(
    folder: Path, streams: Mapping[str, Options], **options: Any
) -> PackedStreamingDataset:
    """Return a dataset of the streams in a folder's subfolders."""
    named = [Stream(local=folder / name, **own) for name, own in streams.items()]
    return PackedStreamingDataset(named, **options)


def online_dataset(
    sources: Mapping[str, Any], streams: Mapping[str, Options], **options: Any
) -> PackedIterableDataset | BucketedIterableDataset:
    """Return a dataset of sources: bucketed if it has a `bucketing`, else packed."""
    named = [
        IterableStream(source, name=name, **streams.get(name, {}))
        for name, source in sources.items()
    ]
    if "bucketing" in options:
        return BucketedIterableDataset(named, **options)
    return PackedIterableDataset(named, **options)
