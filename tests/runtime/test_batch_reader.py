"""Batches through shared memory are exact, even while earlier ones are still in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import IterableStream, PackedIterableDataset, Packing, Stream, formats
from streampack.loader.loader import PackedDataLoader
from streampack.runtime.batch_reader import RingReader
from tests.helpers.batches import LENGTHS, dataset_of, same
from tests.helpers.builders import stream_of
from tests.helpers.examples import crossed

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("stream", "batch_format"),
    crossed(["plain", "mask", "labels"], ["native", "compact", "hf"]),
    indirect=["stream"],
)
def test_batches_that_are_all_held_are_those_of_the_dataset(
    stream: Stream, batch_format: str
) -> None:
    expected = list(dataset_of(stream, batch_format))
    loader = PackedDataLoader(dataset_of(stream, batch_format), num_workers=2, prefetch_factor=3)
    assert isinstance(loader._loading._handing, RingReader)  # type: ignore[union-attr]
    found = list(loader)
    assert len(found) == len(expected) > 100
    assert all(map(same, found, expected))


@pytest.mark.parametrize("stream", ["mask"], indirect=True)
def test_epochs_that_are_left_early_do_not_write_into_those_that_follow(stream: Stream) -> None:
    loader = PackedDataLoader(dataset_of(stream), num_workers=2, prefetch_factor=4)
    here = PackedDataLoader(dataset_of(stream))
    for left_after in (1, 5, 2, 10_000):
        shown, wanted = [], []
        for batches, kept in ((iter(loader), shown), (iter(here), wanted)):
            for number, batch in enumerate(batches, 1):
                kept.append(batch)
                if number == left_after:
                    break
        assert len(shown) == len(wanted)
        assert all(map(same, shown, wanted))


def mine(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in a format unknown to this package."""
    return {"tokens": batch["tokens"] + 1, "epoch": batch["epoch"]}


def test_workers_make_whole_batches_only_where_the_loop_should_not(tmp_path: Path) -> None:
    stream = stream_of(tmp_path / "s", LENGTHS)
    for batch_format in ("torchtune", mine):
        loader = PackedDataLoader(dataset_of(stream, batch_format), num_workers=1)
        assert loader._loading._handing is None  # type: ignore[union-attr]
        assert all(map(same, loader, dataset_of(stream, batch_format)))
    assert set(formats.FORMATS) >= {"torchtune", "compact"}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tensors_that_came_from_a_worker_may_be_written_to_and_share_no_byte(
    num_workers: int,
) -> None:
    source = IterableStream([[5, 6, 7]] * 40)
    dataset = PackedIterableDataset([source], packing=Packing(max_seq_len=8), batch_size=2)
    batches = list(PackedDataLoader(dataset, num_workers=num_workers))

    for batch in batches:
        before = {name: value.clone() for name, value in batch.items() if torch.is_tensor(value)}
        batch["tokens"].fill_(9)
        assert all(torch.equal(batch[name], before[name]) for name in before if name != "tokens")
    storages = {batch["tokens"].untyped_storage().data_ptr() for batch in batches}
    assert len(storages) == len(batches)


@pytest.mark.parametrize("stream", ["plain", "labels"], indirect=True)
def test_a_slow_loop_never_sees_a_slot_that_was_filled_anew(stream: Stream) -> None:
    # Workers are always far ahead; each batch is checked after the next one has arrived.
    dataset = dataset_of(stream, "compact")
    wanted = list(dataset_of(stream, "compact"))
    before = None
    for number, batch in enumerate(PackedDataLoader(dataset, num_workers=2, prefetch_factor=2)):
        if before is not None:
            assert same(before, wanted[number - 1])
        torch.zeros(20_000).sum()
        before = batch
