"""Make datasets from the names of streams, options per stream, and options of the dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from streampack import (
    BucketedIterableDataset,
    Chapter,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from tests.helpers.builders import write_stream_files

Options = Mapping[str, Any]


def planned_dataset(
    folder: Path, streams: Mapping[str, Options], **options: Any
) -> PackedStreamingDataset:
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


def write_chapter_streams(folder: Path) -> dict[str, str]:
    """Write four streams that run out at different steps; return their folders by name."""
    rng = np.random.default_rng(0)
    sizes = {"web": (400, 150), "code": (150, 300), "math": (90, 60), "other": (50, 100)}
    return {
        name: str(write_stream_files(folder / name, rng.integers(1, most, num).tolist())[0])
        for name, (num, most) in sizes.items()
    }


def chapter_dataset(
    folders: Mapping[str, str],
    chapters: Sequence[Chapter],
    *,
    method: str = "stratified",
    names: Sequence[str] = ("web", "code", "math"),
    data: Options | None = None,
    stream: Options | None = None,
    **options: Any,
) -> PackedStreamingDataset:
    """Return a run of chapters; `data` has folders by stream, and `stream` options for each."""
    order = {"seed": 17, "pack_shuffle": 256, "num_lanes": 2} | options.pop("order", {})
    size = options.pop("global_batch_size", 16)
    mixing = {"global_batch_size": size, "batching_method": method} | options.pop("mixing", {})
    defaults = {"packing": Packing(max_seq_len=64), "batch_size": 2, "world": World()}
    return PackedStreamingDataset(
        [
            Stream(name=name, local=folders[(data or {}).get(name, name)], **(stream or {}))
            for name in names
        ],
        chapters=chapters,
        mixing=Mixing(**mixing),
        order=Order(**order),
        **defaults | options,
    )


def state_after(loader: PackedDataLoader, num_batches: int) -> dict[str, Any]:
    """Return a loader's state after so many batches, as JSON gives it back."""
    for _ in islice(loader, num_batches):
        pass
    return json.loads(json.dumps(loader.state_dict()))
