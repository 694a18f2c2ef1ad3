"""Tokens handed over through shared memory: exact, whatever is held, left or labelled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import stream_of
from test_formats import same

from streampack import Packing, Stream, formats
from streampack.load import PackedDataLoader, PackedStreamingDataset
from streampack.load.handover import FoldingReader
from streampack.load.reader import BatchReader
from streampack.load.ring import RingReader
from streampack.streams.mosaic import MDSWriter

LENGTHS = np.random.default_rng(7).integers(1, 200, 300).tolist()


def dataset_of(stream: Stream, batch_format: Any = "native") -> PackedStreamingDataset:
    return PackedStreamingDataset(
        [stream], packing=Packing(max_seq_len=64), batch_size=3, batch_format=batch_format
    )


@pytest.fixture(scope="module", params=["plain", "mask", "labels"])
def stream(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stream]:
    """A stream without, and two with a word on which tokens are targets."""
    folder = tmp_path_factory.mktemp("stream") / "s"
    if request.param == "plain":
        yield stream_of(folder, LENGTHS)
        return
    name = {"mask": "loss_mask", "labels": "labels"}[request.param]
    with MDSWriter(
        out=str(folder), columns={"tokens": "ndarray:int32", name: "ndarray:int32"}
    ) as writer:
        for number, length in enumerate(LENGTHS):
            tokens = np.arange(number, number + length, dtype=np.int32)
            is_target = tokens % 3 > 0
            values = is_target if name == "loss_mask" else np.where(is_target, tokens, -100)
            writer.write({"tokens": tokens, name: values.astype(np.int32)})
    shifted = {} if name == "loss_mask" else {"labels_shifted": False}
    yield Stream(local=str(folder), **{name: name}, **shifted)


@pytest.mark.parametrize("batch_format", ["native", "compact", "hf"])
def test_batches_that_are_all_held_are_those_of_the_dataset(
    stream: Stream, batch_format: str
) -> None:
    expected = list(dataset_of(stream, batch_format))
    loader = PackedDataLoader(dataset_of(stream, batch_format), num_workers=2, prefetch_factor=3)
    assert isinstance(loader._loading._handing, RingReader)  # type: ignore[union-attr]
    found = list(loader)
    assert len(found) == len(expected) > 100
    assert all(map(same, found, expected))


@pytest.mark.parametrize(("batch_format", "used"), [("native", 2), ("hf", 1)])
def test_a_batch_is_made_by_one_of_torchs_threads_beside_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_format: str, used: int
) -> None:
    seen: list[int] = []

    def noted(method: Any) -> Any:
        def finish(*arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return method(*arguments)

        return finish

    monkeypatch.setattr(BatchReader, "finish", noted(BatchReader.finish))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        dataset = dataset_of(stream_of(tmp_path / "s", LENGTHS[:60]), batch_format)
        for _ in PackedDataLoader(dataset, num_workers=1):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    assert set(seen) == {used}


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


def test_workers_make_whole_batches_only_where_the_loop_should_not(tmp_path: Path) -> None:
    def mine(batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": batch["tokens"] + 1, "epoch": batch["epoch"]}

    stream = stream_of(tmp_path / "s", LENGTHS)
    for batch_format in ("torchtune", mine):
        loader = PackedDataLoader(dataset_of(stream, batch_format), num_workers=1)
        assert isinstance(loader._loading._handing, FoldingReader)  # type: ignore[union-attr]
        assert all(map(same, loader, dataset_of(stream, batch_format)))
    assert set(formats.FORMATS) >= {"torchtune", "compact"}


def test_a_slow_loop_never_sees_a_slot_that_was_filled_anew(stream: Stream) -> None:
    # Workers are far ahead all the time; each batch is looked at when the next one is there.
    dataset = dataset_of(stream, "compact")
    wanted = list(dataset_of(stream, "compact"))
    before = None
    for number, batch in enumerate(PackedDataLoader(dataset, num_workers=2, prefetch_factor=2)):
        if before is not None:
            assert same(before, wanted[number - 1])
        torch.zeros(20_000).sum()
        before = batch
