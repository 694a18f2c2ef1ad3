"""`batch_format=`, from files to batches; and the pages of docs/ that speak of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from streampack import formats
from streampack.loader.loader import PackedDataLoader
from tests.helpers.batches import dataset_of, same

pytestmark = [
    pytest.mark.parametrize("stream", ["plain"], indirect=True),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_dataset_yields_the_format_that_the_function_alone_makes(stream: Any, name: str) -> None:
    native = dataset_of(stream, batch_size=1 if name == "llama_factory" else 3)
    expected = [formats.FORMATS[name](batch) for batch in native]
    assert len(expected) > 20
    found = list(dataset_of(stream, name))
    in_thread = list(PackedDataLoader(dataset_of(stream, name)))
    assert len(found) == len(in_thread) == len(expected)
    assert all(map(same, found, expected))
    assert all(map(same, in_thread, expected))


@pytest.mark.processes
def test_a_batch_of_another_format_resumes_under_any_loader(stream: Any) -> None:
    dataset = dataset_of(stream, "hf")
    batches = list(DataLoader(dataset, batch_size=None, num_workers=2))
    state = dataset.state_after(batches[4])
    again = dataset_of(stream, "hf")
    again.load_state_dict(state)
    assert same(next(iter(again)), batches[5])


def test_a_state_fits_every_format(stream: Any) -> None:
    loader = PackedDataLoader(dataset_of(stream, "torchtitan"))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    other = PackedDataLoader(dataset_of(stream, "torchtune"))
    other.load_state_dict(loader.state_dict())
    inputs, _ = next(batches)
    assert torch.equal(next(iter(other))["tokens"], inputs["input"])
