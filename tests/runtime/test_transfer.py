"""A batch is unchanged after a round trip through the memory that is sent."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from streampack import IterableStream, PackedDataLoader, PackedIterableDataset, Packing
from streampack.runtime.transfer import SMALL_BYTES, by_value, pickled_parts, unpickled


def test_every_dtype_and_shape_comes_out_as_it_went_in(monkeypatch):
    batch = {
        "mask": torch.tensor([[True], [False], [True]]),
        "tokens": torch.arange(12).reshape(3, 4),
        "document_ids": torch.arange(5, dtype=torch.int32),
        "large": torch.arange(SMALL_BYTES).to(torch.bfloat16),
        "none": torch.zeros((0, 3), dtype=torch.int64),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "turned": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
        "images": [object, "a"],
        "epoch": 7,
    }

    monkeypatch.setitem(ForkingPickler._extra_reducers, torch.Tensor, by_value)
    parts = pickled_parts(batch)
    assert len(parts) == 2, "a pickle, and the memory of the large tensor"
    found = unpickled([np.array(part) for part in parts])

    assert found.keys() == batch.keys()
    assert (found["images"], found["epoch"]) == (batch["images"], 7)
    for name, tensor in batch.items():
        if torch.is_tensor(tensor):
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert torch.equal(found[name], tensor)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [1, 2])
def test_tensors_that_came_from_a_worker_may_be_written_to_and_share_no_byte(num_workers):
    stream = IterableStream([[5, 6, 7]] * 40)
    dataset = PackedIterableDataset([stream], packing=Packing(max_seq_len=8), batch_size=2)
    batches = list(PackedDataLoader(dataset, num_workers=num_workers))

    for batch in batches:
        before = {name: value.clone() for name, value in batch.items() if torch.is_tensor(value)}
        batch["tokens"].fill_(9)
        assert all(torch.equal(batch[name], before[name]) for name in before if name != "tokens")
    storages = {batch["tokens"].untyped_storage().data_ptr() for batch in batches}
    assert len(storages) == len(batches)
