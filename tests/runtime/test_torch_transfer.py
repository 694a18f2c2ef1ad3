"""Batches on their way out of torch's own workers: what comes out is what went in, and is small."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_convert
from torchdata.stateful_dataloader import StatefulDataLoader

from streampack import (
    ConfigError,
    IterableStream,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
)
from streampack.formats import FORMATS
from streampack.runtime import flat_batch, torch_transfer
from streampack.runtime.resumable import engine_of
from streampack.runtime.torch_transfer import CompactPickleBatch, read_transferable, transferable
from tests.helpers.batches import LENGTHS, dataset_of, same
from tests.helpers.builders import stream_of

Change = Callable[[dict[str, Any]], None]


def sent(batch: Any) -> Any:
    """Return what another process gets."""
    return pickle.loads(ForkingPickler.dumps(batch))


def parcels_of(dataset: PackedStreamingDataset) -> Iterator[Any]:
    """Return a dataset's batches as they are in a worker."""
    engine = engine_of(dataset)
    sequence, read = engine.begin(), engine.reader()
    while (plan := sequence.next()) is not None:
        yield read_transferable(read, plan)


@pytest.mark.thorough
@pytest.mark.parametrize("batch_format", FORMATS)
def test_what_comes_out_is_what_the_dataset_yields(stream: Any, batch_format: str) -> None:
    expected = list(dataset_of(stream, batch_format))
    found = list(parcels_of(dataset_of(stream, batch_format)))
    assert len(found) == len(expected) > 100
    assert all(map(same, found, expected))
    # All are held: none may lie in the room of another.
    arrived = list(map(sent, found))
    assert all(map(same, arrived, expected))
    assert {type(batch) for batch in arrived} == {type(sent(batch)) for batch in expected[:1]}


@pytest.mark.parametrize("convert", [copy.copy, default_convert])
@pytest.mark.parametrize("batch_format", ["native", "hf"])
def test_tokens_alone_are_sent(stream: Any, batch_format: str, convert: Any) -> None:
    for batch in parcels_of(dataset_of(stream, batch_format)):
        rows = batch.inputs.rows
        num_bytes = len(ForkingPickler.dumps(convert(batch)))
        arrays = [rows.tokens, rows.labels, rows.next_tokens, batch.inputs.packs.segments]
        assert num_bytes < sum(array.nbytes for array in arrays if array is not None) + 2000


@pytest.mark.thorough
def test_large_batches_are_the_same_through_shared_memory(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (flat_batch, torch_transfer):
        monkeypatch.setattr(module, "LARGEST_IN_PIPE", 100)
    for batch_format in ("native", "compact", "torchtune"):
        batches = list(parcels_of(dataset_of(stream, batch_format)))[:5]
        assert all(same(sent(batch), dict(batch)) for batch in batches)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[CompactPickleBatch]:
    """Batches of a stream, in a worker."""
    folder = tmp_path_factory.mktemp("stream") / "s"
    return list(parcels_of(dataset_of(stream_of(folder, LENGTHS))))[:20]


def by_numpy(batch: dict[str, Any]) -> None:
    batch["labels"].numpy()[0, :3] = -100


def in_place(batch: dict[str, Any]) -> None:
    batch["input_pos"][1].add_(1)


def through_a_view(batch: dict[str, Any]) -> None:
    batch["segments"].view(-1)[-1] = 99


def other_dtype(batch: dict[str, Any]) -> None:
    batch["tokens"] = batch["tokens"].int()


def other_shape(batch: dict[str, Any]) -> None:
    batch["document_ids"] = batch["document_ids"].flatten()


def turned(batch: dict[str, Any]) -> None:
    batch["input_pos"] = batch["input_pos"].T


def added(batch: dict[str, Any]) -> None:
    batch |= {"name": "a", "weights": torch.rand(2, 3), "more": {"x": [torch.ones(2)], "y": None}}


def left_out(batch: dict[str, Any]) -> None:
    del batch["document_ids"]


def put_last(batch: dict[str, Any]) -> None:
    batch["tokens"] = batch.pop("tokens")


def other_number(batch: dict[str, Any]) -> None:
    batch["epoch"], batch["position"] = True, float(batch["position"])


CHANGES: list[Change] = [
    by_numpy,
    in_place,
    through_a_view,
    other_dtype,
    other_shape,
    turned,
    added,
    put_last,
    other_number,
    left_out,
]


@given(
    number=st.integers(0, 19),
    which=st.sets(st.integers(0, len(CHANGES) - 1)),
)
def test_what_is_done_to_a_batch_in_the_worker_is_not_lost(
    batches: list[CompactPickleBatch], number: int, which: set[int]
) -> None:
    made = batches[number]
    # Its own tensors, as the worker made them: the batch is used by other examples, too.
    batch = CompactPickleBatch(
        {name: copy.deepcopy(value) for name, value in made.items()}, made.inputs
    )
    for change in sorted(which):
        CHANGES[change](batch)
    expected = copy.deepcopy(dict(batch))

    assert same(sent(batch), expected)
    assert same(dict(batch), expected)


def test_unpacking_leaves_torchs_threads_as_they_are(stream: Any) -> None:
    num_threads = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            assert sent(next(parcels_of(dataset_of(stream, "hf"))))["labels"].shape == (3, 64)
            assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(num_threads)


def test_zero_that_became_minus_zero_is_not_lost(stream: Any) -> None:
    batch = next(parcels_of(dataset_of(stream, "megatron")))
    batch["loss_mask"].neg_()
    assert torch.equal(sent(batch)["loss_mask"].signbit(), torch.ones(3, 64, dtype=torch.bool))


def test_tensors_that_are_more_than_their_elements_stay_what_they_are(
    batches: list[CompactPickleBatch],
) -> None:
    batch = copy.copy(batches[0])
    batch["weight"] = torch.nn.Parameter(torch.ones(3))
    batch["half"] = torch.ones(2, dtype=torch.bfloat16)
    found = sent(batch)
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["weight"].requires_grad
    assert found["half"].dtype == torch.bfloat16


def test_other_copies_are_plain_batches_that_need_nothing_of_us(
    batches: list[CompactPickleBatch],
) -> None:
    expected = dict(batches[0])
    file = io.BytesIO()
    torch.save(batches[0], file)
    file.seek(0)
    with torch.serialization.safe_globals([dict]):
        saved = torch.load(file, weights_only=True)
    assert b"streampack" not in pickle.dumps(batches[0]) + file.getvalue()
    copies = [
        copy.deepcopy(batches[0]),
        pickle.loads(pickle.dumps(batches[0])),
        saved,
        batches[0] | {},
        pytree.tree_map(lambda value: value, batches[0]),
    ]
    for found in copies:
        assert type(found) is dict
        assert same(found, expected)
    assert copies[0]["tokens"].data_ptr() != expected["tokens"].data_ptr()


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"batch_size": 4, "num_workers": 1}])
@pytest.mark.parametrize("batch_format", ["native", "hf"])
def test_torchs_loader_is_told_that_batches_are_whole(
    stream: Any, batch_format: str, options: dict[str, Any]
) -> None:
    loader = DataLoader(dataset_of(stream, batch_format), **options)
    with pytest.raises(
        ConfigError, match=r"has batch_size=(1|4) and would stack .*; set DataLoader\(.*=None\)"
    ):
        next(iter(loader))


@pytest.mark.processes
def test_torchs_loader_is_told_of_iterables_too() -> None:
    dataset = PackedIterableDataset([IterableStream([[1, 2]])], packing=Packing(max_seq_len=4))
    with pytest.raises(ConfigError, match=r"has batch_size=1 and would stack whole batches"):
        next(iter(DataLoader(dataset)))


def test_a_thread_may_take_them_out_and_they_may_be_written_to(
    batches: list[CompactPickleBatch],
) -> None:
    messages = [ForkingPickler.dumps(batch) for batch in batches]
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.extend(map(pickle.loads, messages)))
    thread.start()
    thread.join()
    for batch in found:
        batch["tokens"].fill_(7)
        batch["segments"].fill_(7)
    for batch, made in zip(found, batches, strict=True):
        changed = dict(made) | {key: batch[key] for key in ("tokens", "segments")}
        assert same(batch, changed)


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
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_torchs_loaders_deliver_the_batches_of_the_dataset(stream: Any, kind: Any) -> None:
    expected = list(dataset_of(stream))
    found = list(kind(dataset_of(stream), batch_size=None, num_workers=2, prefetch_factor=3))
    assert all(type(batch) is dict for batch in found)
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


@pytest.mark.processes
def test_batches_that_were_made_of_no_rows_go_in_one_piece_if_they_are_small() -> None:
    stream = IterableStream([np.arange(1, 2 + length % 30) for length in LENGTHS])
    dataset = PackedIterableDataset([stream], packing=Packing(max_seq_len=32), batch_size=2)
    expected = list(dataset)
    assert all(same(sent(transferable(batch)), batch) for batch in expected)
    assert len(ForkingPickler.dumps(transferable(expected[0]))) < 28 * 64 + 2500
    dataset.set_epoch(0)
    assert all(map(same, DataLoader(dataset, batch_size=None, num_workers=1), expected))
