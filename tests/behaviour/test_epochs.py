"""Epochs, stops and resumes under three loaders, with and without persistent workers.

Every worker gets a fresh copy of an `IterableDataset` at each epoch, and nothing passes it the
epoch number; a dataset that only counted its own iterations would repeat epoch 0 forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from streampack.errors import ResumeError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.world import World
from tests.helpers import conformance
from tests.helpers.conformance import Written, show
from tests.helpers.examples import crossed

# torchdata calls torch this way.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

NUM_EPOCHS = 3
METHODS = ("random", "stratified", "per_stream", "device_per_stream")
LOADERS = ("packed", "torch", "stateful")
WAYS = [(0, False), (2, False), (2, True)]  # workers, and whether they are persistent


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(5)
    lengths = [rng.integers(1, 50, 40).tolist(), rng.integers(1, 150, 25).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def make(written: Written, **options: Any) -> PackedStreamingDataset:
    # With a quota of 1.5 passes, epochs differ in their samples and in the number of batches.
    return conformance.make(written, weights=[{"repeat": 1.5}, {}], batch_size=4, **options)


@pytest.fixture(scope="module")
def reference(written) -> list[list[Any]]:
    dataset = make(written)
    return [[show(batch) for batch in dataset] for _ in range(NUM_EPOCHS + 1)]


def loader_of(kind: str, dataset: PackedStreamingDataset, workers: int, persistent: bool) -> Any:
    options = {"num_workers": workers, "persistent_workers": persistent}
    if kind == "packed":
        return PackedDataLoader(dataset, **options)
    return {"torch": DataLoader, "stateful": StatefulDataLoader}[kind](
        dataset, batch_size=None, **options
    )


def epoch_of(loader: Any) -> list[Any]:
    # list() would call len(), and torch warns if an epoch turns out to be longer.
    return [show(batch) for batch in loader]


def stop_after(loader: Any, count: int) -> tuple[list[Any], dict[str, Any]]:
    """Take `count` batches and leave the loop; return them, with the last one as it was then."""
    shown, last = [], {}
    for batch in loader:
        shown.append(show(batch))
        last = batch
        if len(shown) == count:
            break
    return shown, last


def save(kind: str, loader: Any, batch: dict[str, Any]) -> Any:
    state = loader.dataset.state_after(batch) if kind == "torch" else loader.state_dict()
    return json.loads(json.dumps(state)) if kind != "stateful" else state


def load(kind: str, loader: Any, state: Any) -> None:
    (loader.dataset if kind == "torch" else loader).load_state_dict(state)


def without_empty(epochs: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Skip the empty epoch that StatefulDataLoader gives after a stop at the end of a loop."""
    return (epoch for epoch in epochs if epoch)


@pytest.mark.parametrize(("kind", "way"), crossed(LOADERS, WAYS))
def test_epochs_advance_by_themselves_and_hold_the_same_batches_in_every_loader(
    written, reference, kind, way
):
    loader = loader_of(kind, make(written), *way)
    assert [epoch_of(loader) for _ in range(NUM_EPOCHS)] == reference[:NUM_EPOCHS]
    assert len({tuple(epoch) for epoch in reference}) == len(reference)


# Faults: resume_epoch_boundary.
@pytest.mark.parametrize(("kind", "way"), crossed(LOADERS, [WAYS[2], WAYS[0]]))
def test_a_run_stopped_anywhere_in_each_epoch_goes_on_in_a_new_loader(
    written, reference, kind, way
):
    for epoch, stop in [(0, 1), (1, len(reference[1]) - 1), (2, len(reference[2]))]:
        dataset = make(written)
        dataset.set_epoch(epoch)
        first = loader_of(kind, dataset, *way)
        head, batch = stop_after(first, stop)
        assert head == reference[epoch][:stop]
        state = save(kind, first, batch)
        del first
        second = loader_of(kind, make(written), *way)
        load(kind, second, state)
        epochs = without_empty(epoch_of(second) for _ in range(3))
        if stop < len(reference[epoch]):
            assert next(epochs) == reference[epoch][stop:]
        assert next(epochs) == reference[epoch + 1]


@pytest.mark.parametrize(("kind", "way"), crossed(LOADERS, [WAYS[0], WAYS[2]]))
def test_set_epoch_chooses_the_next_loop_and_epochs_go_on_from_there(written, reference, kind, way):
    dataset = make(written)
    loader = loader_of(kind, dataset, *way)
    dataset.set_epoch(2)
    assert epoch_of(loader) == reference[2]
    assert epoch_of(loader) == reference[3]
    dataset.set_epoch(1)
    assert epoch_of(loader) == reference[1]
    assert epoch_of(loader) == reference[2]


@pytest.mark.parametrize(("method", "epoch_end"), crossed(METHODS, ["pad", "drop", "carry"]))
def test_len_is_exactly_the_batches_of_each_epoch(written, method, epoch_end):
    mixing = {"epoch_end": epoch_end, "batching_method": method, "global_batch_size": 8}
    for num_ranks in (1, 3):
        for world in conformance.worlds(num_ranks):
            dataset = make(written, mixing=mixing, world=world)
            for _ in range(NUM_EPOCHS):
                stated = len(dataset)
                # In the middle of an epoch, len() is that of the current epoch.
                in_the_middle = [len(dataset) for _ in dataset]
                assert in_the_middle == [stated] * stated


def test_a_state_saved_in_one_worker_is_refused_elsewhere(written):
    first = StatefulDataLoader(make(written), batch_size=None, num_workers=2)
    stop_after(first, 3)
    state = first.state_dict()
    saved = list(find(state, lambda value: isinstance(value, dict) and "worker" in value))
    assert sorted(own["worker"] for own in saved) == [[0, 2], [1, 2]]
    for own in saved:
        with pytest.raises(ResumeError, match=r"in worker \d of 2.*state_after\(batch\)"):
            make(written).load_state_dict(own)


def of_eight(written: Written, batch_size: int, num_ranks: int) -> Any:
    """A StatefulDataLoader with two workers, over a run with eight packs per global batch."""
    dataset = conformance.make(
        written,
        batch_size=batch_size,
        mixing={"global_batch_size": 8},
        world=World(num_ranks=num_ranks),
    )
    return StatefulDataLoader(dataset, batch_size=None, num_workers=2)


@pytest.mark.parametrize(("batch_size", "num_ranks"), [(2, 1), (4, 2), (8, 1)])
def test_a_state_of_workers_is_refused_where_a_step_is_of_another_size(
    written, batch_size, num_ranks
):
    """One worker is a step ahead of the other; steps of another size would overlap or have gaps."""
    first = of_eight(written, 4, 1)
    stop_after(first, 3)
    second = of_eight(written, batch_size, num_ranks)
    second.load_state_dict(first.state_dict())
    window = batch_size * num_ranks
    message = rf"4 packs, but batch_size={batch_size} and .* {window}.*state_after\(batch\)"
    with pytest.raises(ResumeError, match=message):
        next(iter(second))


def test_a_state_of_workers_fits_steps_of_the_same_size(written):
    """The first of two ranks gets the first half of each batch of the single-process run."""
    wanted = [batch["tokens"][:2].tolist() for batch in of_eight(written, 4, 1)]
    first = of_eight(written, 4, 1)
    stop_after(first, 3)
    second = of_eight(written, 2, 2)
    second.load_state_dict(first.state_dict())
    assert [batch["tokens"].tolist() for batch in second] == wanted[3:]


def find(value: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    if wanted(value):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from find(inner, wanted)


@pytest.mark.parametrize(("kind", "epoch_end"), crossed(LOADERS, ["pad", "carry"]))
def test_workers_that_live_on_take_over_a_run_of_another_shape(written, kind, epoch_end):
    mixing = {"epoch_end": epoch_end, "global_batch_size": 12}

    def run(**options: Any) -> PackedStreamingDataset:
        return conformance.make(written, mixing=mixing, **options)

    other = run(batch_size=1, order={"num_lanes": 3})
    other.set_epoch(1)
    state = other.state_after(next(iter(other)) | {"position": 2})
    alone = run(batch_size=2)
    alone.load_state_dict(state)
    wanted = [epoch_of(alone) for _ in range(2)]
    for persistent in (False, True):
        loader = loader_of(kind, run(batch_size=2), 2, persistent)
        assert epoch_of(loader)  # a new run here has one lane
        if kind == "stateful":
            loader.dataset.load_state_dict(state)
        else:
            load(kind, loader, state)
        assert [epoch_of(loader) for _ in range(2)] == wanted


@pytest.mark.parametrize("kind", LOADERS)
def test_epochs_advance_though_the_seed_is_set_back_before_each(written, kind):
    loader = loader_of(kind, make(written), 1, persistent=False)
    epochs = []
    for _ in range(NUM_EPOCHS):
        torch.manual_seed(42)
        epochs.append({batch["epoch"] for batch in loader})
    assert epochs == [{0}, {1}, {2}]


def test_a_position_that_has_become_stale_is_not_handed_out(written):
    dataset = make(written)
    next(iter(dataset))
    assert dataset.state_dict()["position"] == 4
    for _ in DataLoader(dataset, batch_size=None, num_workers=1):
        pass
    with pytest.raises(ResumeError, match="state_after"):
        dataset.state_dict()

    dataset = make(written)
    next(iter(dataset))
    loader = PackedDataLoader(dataset)
    next(iter(loader))
    assert loader.state_dict()["epoch"] == 1
    assert dataset.state_dict() == loader.state_dict()
