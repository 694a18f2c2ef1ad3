"""Batches under torch's own loaders: never stacked, and otherwise plain dicts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from streampack import ConfigError, IterableStream, PackedIterableDataset, Packing
from tests.helpers.batches import LENGTHS, dataset_of, same


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"batch_size": 4, "num_workers": 1}])
@pytest.mark.parametrize("batch_format", ["native", "hf"])
@pytest.mark.parametrize("stream", ["plain"], indirect=True)
def test_torchs_loader_is_told_that_batches_are_whole(
    stream: Any, batch_format: str, options: dict[str, Any]
) -> None:
    loader = DataLoader(dataset_of(stream, batch_format), **options)
    with pytest.raises(
        ConfigError, match=r"has batch_size=(1|4) and would stack .*; set DataLoader\(.*=None\)"
    ):
        next(iter(loader))


def test_copies_are_plain_batches_that_can_be_loaded_without_this_package(stream: Any) -> None:
    batch = next(iter(dataset_of(stream)))
    expected = dict(batch)
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    with torch.serialization.safe_globals([dict]):
        saved = torch.load(file, weights_only=True)
    assert b"streampack" not in pickle.dumps(batch) + file.getvalue()
    copies = [
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        saved,
        batch | {},
        pytree.tree_map(lambda value: value, batch),
    ]
    for found in copies:
        assert type(found) is dict
        assert same(found, expected)
    assert copies[1]["tokens"].data_ptr() != expected["tokens"].data_ptr()


class _Wrapped(IterableDataset[Any]):
    """A dataset around ours, as users write them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            assert isinstance(batch, dict)
            batch["mean"] = batch["tokens"].float().mean()
            yield batch


def _without_odd(batch: dict[str, Any]) -> dict[str, Any]:
    labels = batch["labels"].numpy()
    labels[labels % 2 == 1] = -100
    return batch


@pytest.mark.processes
def test_wrappers_and_collate_functions_in_the_worker_see_and_change_usual_batches(
    stream: Any,
) -> None:
    expected = [_without_odd(batch) for batch in _Wrapped(dataset_of(stream))]
    loader = DataLoader(
        _Wrapped(dataset_of(stream)), batch_size=None, num_workers=2, collate_fn=_without_odd
    )
    found = list(loader)
    assert len(found) == len(expected) > 100
    assert all(type(batch) is dict for batch in found)
    assert all(map(same, found, expected))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("kind", "batch_format"),
    [(DataLoader, "native"), (DataLoader, "compact"), (StatefulDataLoader, "hf")],
)
def test_torchs_loaders_deliver_the_batches_of_the_dataset(
    stream: Any, kind: Any, batch_format: str
) -> None:
    expected = list(dataset_of(stream, batch_format))
    dataset = dataset_of(stream, batch_format)
    found = list(kind(dataset, batch_size=None, num_workers=2, prefetch_factor=3))
    assert all(type(batch) is dict for batch in found)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


@pytest.mark.processes
def test_torchs_loader_delivers_the_batches_of_iterables() -> None:
    stream = IterableStream([np.arange(1, 2 + length % 30) for length in LENGTHS])
    dataset = PackedIterableDataset([stream], packing=Packing(max_seq_len=32), batch_size=2)
    expected = list(dataset)
    dataset.set_epoch(0)
    assert all(map(same, DataLoader(dataset, batch_size=None, num_workers=1), expected))
