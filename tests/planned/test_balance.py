"""With `balance`, each optimizer step has the same packs, dealt at equal cost to the ranks."""

from __future__ import annotations

import pytest

from streampack import AttentionCost, Balance, PackedDataLoader, ResumeError, World
from streampack.plan.device_plan import sharing_of
from tests.helpers import conformance
from tests.helpers.conformance import rows, show, worlds

MIXING = {"global_batch_size": 16}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    lengths = [[1 + number**2 % 60 for number in range(500)], [5] * 80]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


def datasets_of(written, balance, num_ranks=4, batch_size=2, **options):
    return [
        conformance.make(
            written,
            mixing=MIXING,
            batch_size=batch_size,
            balance=balance,
            world=world,
            **options,
        )
        for world in worlds(num_ranks, 2 if num_ranks > 1 else 1)
    ]


def global_batches(datasets) -> list[list]:
    """The sorted rows of each global batch, from the batches of all ranks."""
    steps = list(zip(*[[rows(batch) for batch in own] for own in datasets], strict=True))
    per_batch = 16 // (len(datasets) * datasets[0].batch_size)
    return [
        sorted(row for step in steps[n : n + per_batch] for own in step for row in own)
        for n in range(0, len(steps), per_batch)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("within", ["rank", "node", "batch"])
def test_every_world_trains_on_the_packs_of_one_process_in_each_global_batch(written, within):
    balance = Balance(within=within)
    wanted = global_batches(datasets_of(written, None, 1))
    for num_ranks, batch_size in ((1, 2), (2, 4), (4, 2), (4, 4)):
        assert global_batches(datasets_of(written, balance, num_ranks, batch_size)) == wanted


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_a_state_from_inside_a_global_batch_resumes_in_the_same_world_alone(written, num_workers):
    balance = Balance(within="node")
    datasets = list(enumerate(datasets_of(written, balance)))
    for rank, dataset in datasets[:: 3 if num_workers else 1]:
        loader = PackedDataLoader(dataset, num_workers=num_workers)
        seen, states = [], []
        for batch in loader:
            seen.append(show(batch))
            states.append(loader.state_dict())
        assert "balance" in states[2]
        assert "balance" not in states[3]
        again = PackedDataLoader(datasets_of(written, balance)[rank], num_workers=num_workers)
        again.load_state_dict(states[2])
        assert [show(batch) for batch in again] == seen[3:]


def test_elsewhere_it_is_refused_and_the_edge_that_is_named_works(written):
    wanted = global_batches(datasets_of(written, None, 1))
    (dataset, *_) = datasets_of(written, Balance(within="node"))
    batches = iter(dataset)
    states = [dataset.state_after(next(batches)) for _ in range(12)]
    for others in (
        datasets_of(written, None),
        datasets_of(written, Balance(within="batch")),
        datasets_of(written, Balance(within="node", cost=AttentionCost(hidden_size=64))),
        datasets_of(written, Balance(within="node"), 2, 4),
    ):
        message = r"inside a global batch, at position 88, .*set the state's 'position' to 80$"
        for other in others:
            with pytest.raises(ResumeError, match=message):
                other.load_state_dict(states[10])
            other.load_state_dict(states[10] | {"position": 80})
        assert global_batches(others) == wanted[5:]
        for other in others:
            other.load_state_dict(states[11])
        assert global_batches(others) == wanted[6:]


def test_a_state_after_the_last_batch_begins_the_next_epoch_in_any_world(written):
    (dataset, *_) = datasets_of(written, Balance(within="node"))
    *_, last = list(dataset)
    state = dataset.state_after(last)
    assert state["position"] % 16
    (other,) = datasets_of(written, None, 1)
    other.load_state_dict(state)
    assert not any(batch["document_ids"].any() for batch in other)  # steps of padding
    assert next(iter(other))["epoch"] == 1


def test_ranks_that_share_a_batch_share_a_place():
    ranks = [World(rank=rank, num_ranks=8, ranks_per_node=4, replication=2) for rank in range(8)]
    assert [rank.place for rank in ranks] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert [sharing_of(rank, Balance()) for rank in ranks] == [(0, 2)] * 4 + [(1, 3)] * 4


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_stats_report_how_long_ranks_wait(written, num_workers):
    (dataset, *_) = datasets_of(written, Balance(within="batch"))
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    assert loader.stats()["straggler"] is None
    list(loader)
    found = loader.stats()["straggler"]
    assert 1 <= found["dealt"] <= found["planned"]
    plain = PackedDataLoader(datasets_of(written, None)[0])
    list(plain)
    assert plain.stats()["straggler"] is None
