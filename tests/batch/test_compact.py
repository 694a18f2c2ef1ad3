"""An expanded compact batch equals the native batch, bit for bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack import Packing, Stream
from streampack.batch.batch import make_batches, make_compacts
from streampack.batch.compact import expand_on, to_compact
from streampack.gather.gather import Rows
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from tests.helpers.batches import same
from tests.helpers.builders import stream_of, write_stream_files
from tests.helpers.packs import native_batch
from tests.helpers.rows import planned_rows

CPU = torch.device("cpu")
# With the kernel used on a CPU, and with the torch operations used on a GPU.
WAYS = [streampack.expand, partial(expand_on, device=CPU)]


@pytest.mark.parametrize("expand", WAYS, ids=["kernel", "torch"])
@given(
    planned=planned_rows(),
    dtype=st.sampled_from([np.int32, np.uint16]),
    positions=st.sampled_from(["restart", "continue"]),
    has_labels=st.booleans(),
)
def test_an_expanded_batch_is_the_native_one(expand, planned, dtype, positions, has_labels):
    wide, packs = planned
    labels = np.where(wide.tokens % 3 == 0, -100, wide.tokens) if has_labels else None
    native = Rows(tokens=wide.tokens, next_tokens=wide.next_tokens, labels=labels)
    short = Rows(
        tokens=wide.tokens.astype(dtype),
        next_tokens=wide.next_tokens,
        labels=None if labels is None else labels.astype(np.int32),
    )
    [compact] = make_compacts(short, packs, steps=[(3, 40)], positions=positions)
    [batch] = make_batches(native, packs, steps=[(3, 40)], positions=positions)
    assert same(expand(compact), batch)


@pytest.mark.parametrize("expand", WAYS, ids=["kernel", "torch"])
@given(
    rows=st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4),
    multiple=st.integers(1, 4),
    seed=st.integers(0, 99),
    masked=st.booleans(),
)
def test_a_native_batch_comes_back_from_its_compact_form(expand, rows, multiple, seed, masked):
    cuts = [(0, len(rows[0]) - 1)] if rows[0] else []
    batch = native_batch(rows, 4 * 8, seed=seed, multiple=multiple, cuts=cuts)
    if masked:
        batch["labels"][batch["labels"] % 3 == 1] = -100
    compact = to_compact(batch)
    assert compact["tokens"].dtype == torch.int32
    assert same(expand(compact), batch)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    lengths = np.random.default_rng(4).integers(1, 300, 150).tolist()
    folder = tmp_path_factory.mktemp("stream") / "s"
    write_stream_files(folder, lengths, dtype="uint16")
    return Stream(local=str(folder))


PACKINGS = [
    Packing(max_seq_len=128),
    Packing(max_seq_len=128, positions="continue", bos_id=1, eos_id=2),
    Packing(max_seq_len=128, pad_to_multiple=8),
]


@pytest.mark.processes
@pytest.mark.parametrize("packing", PACKINGS, ids=["plain", "continue", "multiple"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_yields_compact_batches_of_the_same_packs(stream, packing, num_workers):
    def made(batch_format: str) -> PackedStreamingDataset:
        return PackedStreamingDataset(
            [stream], packing=packing, batch_size=4, batch_format=batch_format
        )

    native = list(made("native"))
    loader = PackedDataLoader(made("compact"), num_workers=num_workers)
    compact = list(loader)  # kept together: no batch may overwrite one that is in use
    assert len(native) > 20
    assert all(map(same, map(streampack.expand, compact), native))
    # The ids of a uint16 stream fit in two bytes.
    assert {batch["tokens"].dtype for batch in compact} == {torch.uint16}
    assert loader.dataset.state_after(compact[3])["position"] == native[3]["position"]


def test_a_compact_batch_has_a_seventh_of_the_bytes(tmp_path):
    stream = stream_of(tmp_path / "s", [1000] * 40)

    def first_bytes(batch_format: str) -> int:
        dataset = PackedStreamingDataset(
            [stream], packing=Packing(max_seq_len=8192), batch_size=4, batch_format=batch_format
        )
        batch = next(iter(dataset))
        return sum(value.nbytes for value in batch.values() if torch.is_tensor(value))

    assert first_bytes("native") / first_bytes("compact") > 6.5
