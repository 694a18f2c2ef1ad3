"""`PackedDataLoader`: its counts, its failures, its workers."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from streampack.errors import DataError
from streampack.loader.loader import PackedDataLoader
from tests.helpers import conformance
from tests.helpers.conformance import Written, show, worlds
from tests.helpers.examples import crossed

METHODS = ("random", "stratified", "per_stream", "device_per_stream")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    return write(tmp_path_factory.mktemp("streams"))


def write(folder: Path, **options: Any) -> Written:
    rng = np.random.default_rng(6)
    lengths = [rng.integers(1, 50, 120).tolist(), rng.integers(1, 200, 60).tolist()]
    return conformance.write_streams(folder, lengths, **options)


# Statistics.


def recount(batches: list[dict[str, Any]], written: Written, max_seq_len: int) -> dict[str, Any]:
    """The result expected from stats(), counted from batches."""
    segments = np.concatenate([batch["segments"].numpy() for batch in batches])
    streams = {}
    for stream in range(len(written.tokens)):
        own = segments[segments[:, 1] == stream]
        begins = own[own[:, 4] == 0]
        wholes = np.array(written.lengths[stream])[begins[:, 3]]
        streams[f"s{stream}"] = {
            "samples": len(begins),
            "tokens": int(own[:, 5].sum()),
            "split": int((begins[:, 5] < wholes).sum()),
        }
    packs = sum(len(np.unique(batch["segments"][:, 0])) for batch in batches)
    tokens = int(segments[:, 5].sum())
    real = sum(int((batch["document_ids"] > 0).sum()) for batch in batches)
    assert tokens == real
    return {
        "streams": streams,
        "packs": packs,
        "tokens": tokens,
        "fill": tokens / (packs * max_seq_len),
    }


@pytest.mark.processes
@pytest.mark.parametrize(("method", "num_workers"), crossed(METHODS, [0, 2]))
def test_stats_are_what_a_recount_of_the_batches_gives(written, method, num_workers):
    mixing = {"batching_method": method, "global_batch_size": 20}
    dataset = conformance.make(written, mixing=mixing)
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    batches = []
    for batch in loader:
        batches.append(batch)
        stats = loader.stats()
        wanted = recount(batches, written, 64)
        for name, counts in wanted["streams"].items():
            own = stats["streams"][name]
            assert {key: own[key] for key in counts} == counts
            assert own["share_samples"] == pytest.approx(
                counts["samples"] / sum(s["samples"] for s in wanted["streams"].values())
            )
            assert own["share_tokens"] == pytest.approx(counts["tokens"] / wanted["tokens"])
        assert {key: stats[key] for key in ("packs", "tokens", "fill")} == {
            key: wanted[key] for key in ("packs", "tokens", "fill")
        }
    assert stats["tokens"] == sum(map(sum, written.lengths))
    assert stats["streams"]["s1"]["split"] == sum(length > 64 for length in written.lengths[1])
    assert stats["fill"] > 0.9


def test_counts_that_are_asked_for_after_every_batch_are_those_of_the_end(written):
    mixing = {"epoch_end": "pad", "global_batch_size": 64}
    often = PackedDataLoader(conformance.make(written, batch_size=16, mixing=mixing))
    once = PackedDataLoader(conformance.make(written, batch_size=16, mixing=mixing))
    seen = [often.stats()["padding_packs"] for _ in often]
    list(once)

    assert seen[-1] == once.stats()["padding_packs"] > 0
    assert seen[0] == 0


def test_a_truncated_sample_is_counted_once_in_however_many_packs_it_lies(written):
    packing = {"overflow": "truncate", "method": "concat"}
    loader = PackedDataLoader(conformance.make(written, packing=packing))
    for _ in loader:
        pass
    own = loader.stats()["streams"]["s1"]
    assert own["truncated"] == sum(length > 64 for length in written.lengths[1])
    assert own["split"] > own["truncated"] / 2


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_losses_add_up_over_epochs_ranks_and_resumes(written, overflow):
    key = {"truncate": "truncated", "drop": "dropped"}[overflow]
    num_long = sum(length > 64 for length in written.lengths[1])
    loaders = [
        PackedDataLoader(
            conformance.make(written, packing={"overflow": overflow}, world=world, batch_size=1)
        )
        for world in worlds(3)
    ]
    state = {}
    for epoch in range(2):
        for loader in loaders:
            for done, _ in enumerate(loader, 1):
                if done == 5:
                    state = loader.state_dict()
        lost = [loader.stats()["streams"]["s1"][key] for loader in loaders]
        assert sum(lost) == (epoch + 1) * num_long
    again = loaders[-1]
    again.load_state_dict(state)
    for _ in again:
        pass
    # Only the batches after the state count, though the epoch is replanned from its start.
    assert again.stats()["streams"]["s1"][key] < num_long


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_targets_are_the_shares_asked_for_in_their_unit(written, unit):
    weights = [{"proportion": 0.25}, {"proportion": 0.75}]
    dataset = conformance.make(written, weights=weights, mixing={"weight_unit": unit})
    loader = PackedDataLoader(dataset)
    for _ in loader:
        pass
    streams = loader.stats()["streams"]
    for name, share in (("s0", 0.25), ("s1", 0.75)):
        assert streams[name]["target"] == pytest.approx(share, abs=0.01)
        assert streams[name][f"share_{unit}"] == pytest.approx(share, abs=0.03)


# Failures.


def truncate_shard(written: Written, stream: int, shard: int) -> Path:
    path = written.paths[stream] / f"shard.{shard:05}.mds"
    path.write_bytes(path.read_bytes()[:-40])
    return path


@pytest.mark.processes
@pytest.mark.parametrize(
    "loader", ["threads", "workers", pytest.param("spawned", marks=pytest.mark.slow), "torch"]
)
def test_a_truncated_shard_is_a_data_error_in_the_loop_at_once(tmp_path, loader):
    written = write(tmp_path)
    dataset = conformance.make(written)
    path = truncate_shard(
        written, 1, 2
    )  # a shard that was truncated earlier would be refused above
    loaders = {
        "threads": lambda: PackedDataLoader(dataset),
        "workers": lambda: PackedDataLoader(dataset, num_workers=2),
        "spawned": lambda: PackedDataLoader(
            dataset, num_workers=1, multiprocessing_context="spawn"
        ),
        "torch": lambda: DataLoader(dataset, batch_size=None, num_workers=2),
    }
    with pytest.raises(DataError, match=rf"(?s){path.name}.*\d+ bytes"):
        for _ in loaders[loader]():
            pass
    assert not [t for t in threading.enumerate() if t.name.startswith("streampack-read")]


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mended_shard_can_be_gone_on_with_from_the_last_batch(tmp_path, num_workers):
    written = write(tmp_path)
    wanted = [show(batch) for batch in conformance.make(written)]
    path = written.paths[1] / "shard.00002.mds"
    whole = path.read_bytes()
    # Open shards are cached by path, so a copy counts as never opened.
    copy = tmp_path / "copy"
    copy.mkdir()
    for own in written.paths:
        own.rename(copy / own.name)
    moved = Written(paths=tuple(copy / p.name for p in written.paths), tokens=written.tokens)
    loader = PackedDataLoader(conformance.make(moved), num_workers=num_workers)
    truncate_shard(moved, 1, 2)
    shown = []
    with pytest.raises(DataError, match=path.name):
        shown.extend(show(batch) for batch in loader)
    state = loader.state_dict()
    (copy / "s1" / path.name).write_bytes(whole)
    loader.load_state_dict(state)
    assert shown + [show(batch) for batch in loader] == wanted


# Workers.


@pytest.mark.processes
@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_that_are_not_forked_deliver_the_same(written, context):
    wanted = [show(batch) for batch in conformance.make(written)]
    loader = PackedDataLoader(
        conformance.make(written), num_workers=1, multiprocessing_context=context
    )
    assert [show(batch) for batch in loader] == wanted


@pytest.mark.processes
@pytest.mark.slow
def test_spawned_workers_of_another_loader_advance_their_epochs_too(written):
    dataset = conformance.make(written)
    wanted = [[show(batch) for batch in conformance.make(written)]]
    other = conformance.make(written)
    other.set_epoch(1)
    wanted.append([show(batch) for batch in other])
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert [[show(batch) for batch in loader] for _ in range(2)] == wanted


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iteration_that_nobody_took_a_batch_of_is_none(written, num_workers):
    # Some trainers call iter() only to see whether a loader is iterable.
    wanted = [show(batch) for batch in PackedDataLoader(conformance.make(written))]
    loader = PackedDataLoader(conformance.make(written), num_workers=num_workers)
    iter(loader)
    taken = iter(loader)
    iter(loader)
    assert [show(next(taken)), show(next(taken))] == wanted[:2]
    state = loader.state_dict()

    loader.load_state_dict(state)
    iter(loader)
    assert loader.state_dict()["position"] == state["position"]
    assert [show(batch) for batch in loader] == wanted[2:]

    next(iter(loader))
    begun = iter(loader)  # the previous epoch was left after one batch
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (2, 0)
    assert next(begun)["epoch"] == 2


class Scaled:
    """A custom format without a hash that can only be compared with its own kind."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __call__(self, batch: dict[str, Any]) -> Any:
        return batch["tokens"] * self.scale

    def __eq__(self, other: Any) -> bool:
        return self.scale == other.scale


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_format_may_be_of_a_class_without_a_hash(written, num_workers):
    packing = {"positions": "continue"}
    wanted = [3 * batch["tokens"] for batch in conformance.make(written, packing=packing)]
    dataset = conformance.make(written, packing=packing, batch_format=Scaled(3))
    for loader in (dataset, PackedDataLoader(dataset, num_workers=num_workers)):
        found = list(loader)
        assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
        dataset.set_epoch(0)


@pytest.mark.processes
def test_persistent_workers_serve_every_epoch(written):
    others = set(multiprocessing.active_children())  # of loaders that are not collected yet
    loader = PackedDataLoader(conformance.make(written), num_workers=1, persistent_workers=True)
    of_epochs = []
    for _ in range(2):
        list(loader)
        own = set(multiprocessing.active_children()) - others
        of_epochs.append({worker.pid for worker in own})
    assert of_epochs[0] == of_epochs[1] != set()


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_copy_of_a_loader_goes_on_with_its_state_and_its_own_workers(written, num_workers):
    loader = PackedDataLoader(conformance.make(written), num_workers=num_workers)
    batches = iter(loader)
    first = show(next(batches))

    copied = copy.deepcopy(loader)

    assert copied.stats()["packs"] == loader.stats()["packs"]
    copied.load_state_dict(loader.state_dict())
    assert [first, *map(show, copied)] == [first, *map(show, batches)]
