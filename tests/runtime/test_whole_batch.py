"""Batches under torch's own loaders: never stacked, and otherwise plain dicts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from streampack import ConfigError
from tests.helpers.batches import dataset_of, same
from tests.helpers.examples import crossed


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "batch_format"),
    crossed([{}, {"batch_size": 4, "num_workers": 1}], ["native", "hf"]),
)
@pytest.mark.parametrize("stream", ["plain"], indirect=True)
def test_torchs_loader_is_told_that_batches_are_whole(
    stream: Any, batch_format: str, options: dict[str, Any]
) -> None:
    loader = DataLoader(dataset_of(stream, batch_format), **options)
    with pytest.raises(
        ConfigError, match=r"has batch_size=(1|4) and would stack .*; use DataLoader\(.*=None\)"
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
@pytest.mark.parametrize("stream", ["mask"], indirect=True)
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
