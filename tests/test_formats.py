"""`batch_format=`, from files to batches; and the pages of docs/ that speak of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from streampack import formats
from streampack.config import Packing
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from tests.helpers.batches import same
from tests.helpers.builders import stream_of

PACKING = Packing(max_seq_len=64)
LENGTHS = np.random.default_rng(4).integers(1, 90, 150).tolist()


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield stream_of(tmp_path_factory.mktemp("stream") / "s", LENGTHS)
    torch.set_num_threads(before)


def size_for(name: Any) -> int:
    """Return the most packs, up to two, that batches of a format may have."""
    return 1 if name == "llama_factory" else 2


def dataset_of(
    stream: Any, batch_format: Any = "native", batch_size: int | None = None
) -> PackedStreamingDataset:
    size = size_for(batch_format) if batch_size is None else batch_size
    return PackedStreamingDataset(
        [stream], packing=PACKING, batch_size=size, batch_format=batch_format
    )


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_dataset_yields_the_format_that_the_function_alone_makes(stream: Any, name: str) -> None:
    native = dataset_of(stream, batch_size=size_for(name))
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
