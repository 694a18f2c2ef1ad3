"""Resume, row by row of the reliability table: exact, or refused with the field that differs.

::

    stop after batch 5 --state as JSON--> another loader: as many workers, ranks, packs a batch or
                                          others --> every token of the epoch once

What must be the same for all worlds and every batch is in `tests/behaviour/test_resume.py`; here
is each
case that lost or repeated samples elsewhere.

Cost: about 10 s, most of it starts of workers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack.errors import ResumeError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.world import World
from tests.helpers import conformance
from tests.helpers.conformance import Written, rows, show, worlds

NUM_SAMPLES = 200
GLOBAL_BATCH = 24
STOP = 5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    lengths = [20 + (i * 37) % 61 for i in range(NUM_SAMPLES)]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), [lengths])


def make(written: Written, **options: Any) -> PackedStreamingDataset:
    """A dataset whose epochs are some 160 packs."""
    order = {"shuffle_block_size": 50, "num_lanes": 2, **options.pop("order", {})}
    mixing = {"global_batch_size": GLOBAL_BATCH}
    return conformance.make(written, order=order, mixing=mixing, **options)


def stopped(
    dataset: PackedStreamingDataset, num_batches: int = STOP, num_workers: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Take some batches; return their packs and the state, as it comes out of a file."""
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    got = [row for batch in islice(loader, num_batches) for row in rows(batch)]
    return got, json.loads(json.dumps(loader.state_dict()))


def rest_of(
    dataset: PackedStreamingDataset, state: dict[str, Any], num_workers: int = 0
) -> list[Any]:
    """Go on from a state to the epoch's end; return the packs."""
    loader = PackedDataLoader(dataset, num_workers=num_workers)
    loader.load_state_dict(state)
    return [row for batch in loader for row in rows(batch)]


def check_once(packs: Sequence[Any], written: Written) -> None:
    """Check that packs are an epoch: every token of every sample once."""
    conformance.check_exactly_once(packs, written, [NUM_SAMPLES])


def test_the_same_config_goes_on_bit_for_bit(written):
    """Hold resume_same."""
    whole = [show(batch) for batch in PackedDataLoader(make(written))]
    _, state = stopped(make(written))
    loader = PackedDataLoader(make(written))
    loader.load_state_dict(state)
    assert [show(batch) for batch in loader] == whole[STOP:]


@pytest.mark.parametrize(("before", "after", "stop"), [(2, 0, 5), (2, 3, 5), (3, 3, 7), (3, 3, 1)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_other_numbers_of_workers_go_on_with_the_same_packs(written, before, after, stop):
    """Hold resume_odd_stop_3_workers, resume_workers_2_to_0 and resume_workers_2_to_3."""
    whole = [row for batch in PackedDataLoader(make(written)) for row in rows(batch)]
    done, state = stopped(make(written), stop, num_workers=before)
    packs = done + rest_of(make(written), state, num_workers=after)
    assert packs == whole
    check_once(packs, written)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_other_numbers_of_ranks_take_every_sample_once(written, before, after):
    """Hold resume_ranks_1_to_2 and resume_ranks_2_to_1."""
    done, states = [], []
    for world in worlds(before):
        packs, state = stopped(make(written, world=world))
        done += packs
        states.append(state)
    assert {state["position"] for state in states} == {states[0]["position"]}
    for world in worlds(after):
        done += rest_of(make(written, world=world), states[0])
    check_once(done, written)


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_another_batch_size_takes_every_sample_once_or_is_refused(written, stop):
    """Hold resume_batch_8_to_12."""
    done, state = stopped(make(written, batch_size=8), stop)
    if state["position"] % 12:
        with pytest.raises(ResumeError, match=r"not a multiple of batch_size=12"):
            rest_of(make(written, batch_size=12), state)
    else:
        check_once(done + rest_of(make(written, batch_size=12), state), written)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_at_the_epochs_end_goes_on_with_the_next_epoch(written, num_workers):
    """Hold resume_epoch_boundary."""
    loader = PackedDataLoader(make(written), num_workers=num_workers)
    first = [row for batch in loader for row in rows(batch)]
    state = json.loads(json.dumps(loader.state_dict()))
    check_once(first, written)
    loader = PackedDataLoader(make(written), num_workers=num_workers)
    loader.load_state_dict(state)
    second = []
    for batch in loader:
        assert batch["epoch"] == 1
        second += rows(batch)
    check_once(second, written)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"shuffle_block_size": 10}, r"shuffle_block_size=50.*shuffle_block_size=10"),
        ({"seed": 4}, r"seed=3.*seed=4"),
        ({"shuffle": False}, r"shuffle=True.*shuffle=False"),
    ],
)
def test_another_order_is_refused_by_its_field(written, order, message):
    """Hold resume_block_size_changed and resume_shuffle_algo_changed."""
    _, state = stopped(make(written))
    with pytest.raises(ResumeError, match=message):
        make(written, order=order).load_state_dict(state)


def test_a_stream_that_grew_is_refused(written, tmp_path):
    """Hold resume_dataset_grew."""
    _, state = stopped(make(written))
    grown = conformance.write_streams(tmp_path, [[*written.lengths[0], *range(20, 70)]])
    with pytest.raises(ResumeError, match=r"streams\[0\]\) holds other data"):
        make(grown).load_state_dict(state)


def test_the_state_counts_whatever_a_collate_makes_of_the_batches(written):
    """Hold resume_list_collate."""
    # A collate that gives lists, in which nothing says how many samples or packs they are.
    loader = PackedDataLoader(make(written))
    done = []
    for batch in islice(map(rows, loader), STOP):
        done += batch
    packs = done + rest_of(make(written), json.loads(json.dumps(loader.state_dict())))
    check_once(packs, written)


def test_a_collate_that_drops_the_place_leaves_no_wrong_state(written):
    # Under torch's own loader, only a batch knows where it lies; without that, nobody guesses.
    dataset = make(written)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=rows)
    batch = list(islice(loader, STOP))[-1]
    with pytest.raises(ResumeError, match=r"cannot know its position"):
        dataset.state_dict()
    with pytest.raises(ResumeError, match=r"the batch has no epoch and no position"):
        dataset.state_after({"rows": batch})


@pytest.mark.parametrize("damage", [{"position": -1}, {"position": 10**9}, {"epoch": -2}])
def test_a_state_that_lies_outside_the_epoch_is_refused(written, damage):
    _, state = stopped(make(written))
    with pytest.raises(ResumeError):
        rest_of(make(written), state | damage)


def test_a_lone_process_and_a_world_of_one_are_the_same(written):
    assert rest_of(make(written, world=World(rank=0, num_ranks=1)), stopped(make(written))[1])
