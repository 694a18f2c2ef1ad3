"""States of iterables: exact at every batch, and refused where they do not fit."""

from __future__ import annotations

import json
import multiprocessing
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from streampack import (
    ConfigError,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    Payloads,
    ResumeError,
    WorkerError,
)
from streampack.runtime.resumable import engine_of
from tests.helpers.batches import same
from tests.helpers.iterables import Again, ByChar, WithState, assert_continues, pieces, rows_of

# torchdata's own call into torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LENGTHS = [7, 12, 30, 2, 9, 11, 70, 3, 5, 21] * 8


def dataset(kind: type = list, **kwargs) -> PackedIterableDataset:
    """Two sources of 80 and 40 samples, of a few packs each."""
    method = kwargs.pop("method", "random")
    return PackedIterableDataset(
        [
            IterableStream(kind(rows_of(0, LENGTHS)), proportion=2, name="a"),
            IterableStream(kind(rows_of(1, LENGTHS[:40])), proportion=1, name="b"),
        ],
        packing=kwargs.pop("packing", Packing(max_seq_len=32)),
        mixing=Mixing(batching_method=method),
        order=Order(seed=3, pack_shuffle=kwargs.pop("window", None)),
        batch_size=2,
        **kwargs,
    )


class KnowsLate(WithState):
    """Like most generators: its position is only updated when the next item is requested."""

    def __init__(self, rows):
        super().__init__(rows)
        self.next = 0

    def __iter__(self):
        start, self.next = self.next, 0
        for index in range(start, len(self.rows)):
            self.at = index + 1
            yield self.rows[index]

    def load_state_dict(self, state):
        self.next = state["at"]


def dataset_of(source) -> PackedIterableDataset:
    """One source in packs of two of its samples."""
    return PackedIterableDataset([IterableStream(source)], packing=Packing(max_seq_len=16))


def test_a_sources_state_may_be_what_it_goes_on_to_change():
    class Live(KnowsLate):
        def __init__(self, rows):
            super().__init__(rows)
            self.state = {"at": 0}

        def __iter__(self):
            for row in super().__iter__():
                self.state["at"] = self.at
                yield row

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.state = state

    original, states, saved, batches = dataset_of(Live(rows_of(0, [8] * 200))), [], [], []
    for batch in original:
        batches.append(batch)
        states.append(original.state_dict())
        saved.append(json.dumps(states[-1]))
    for at in (33, 40, 70):
        resumed = dataset_of(Live(rows_of(0, [8] * 200)))
        resumed.load_state_dict(states[at])
        assert same(list(resumed), batches[at + 1 :]), at
    assert [json.dumps(state) for state in states] == saved


def test_a_source_with_a_state_is_put_there_and_not_gone_through_again():
    rows = rows_of(0, [8] * 900)
    make = lambda: WithState(rows)  # noqa: E731
    packing = Packing(max_seq_len=32)
    original = PackedIterableDataset([IterableStream(make())], packing=packing)
    batches = iter(original)
    for _ in range(200):
        next(batches)

    source = make()
    resumed = PackedIterableDataset([IterableStream(source)], packing=packing)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))

    assert same(next(iter(resumed)), next(batches))
    assert source.num_given < 2 * 1024 + 64, "two windows, and 64 items between two states"


def spoil(state: Any) -> None:
    """Change everything in a state, as a caller may do with its copy."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, dict | list):
            spoil(value)
    state.clear()


def test_a_state_that_was_handed_over_is_nobody_elses():
    original, resumed = dataset(WithState), dataset(WithState)
    whole = list(dataset(WithState))
    spoil(original.state_dict())
    batches = iter(original)
    next(batches)
    spoil(original.state_dict())
    state = original.state_dict()
    resumed.load_state_dict(state)
    spoil(state)
    rest = list(batches)

    assert same(rest, whole[1:])
    assert same(list(resumed), whole[1:])


@pytest.mark.processes
@pytest.mark.parametrize(("num_workers", "window"), [(0, None), (2, None), (2, 8)])
def test_our_loader_resumes_exactly_whichever_worker_was_last(num_workers, window):
    make = lambda: PackedDataLoader(dataset(window=window), num_workers=num_workers)  # noqa: E731
    whole = list(make())
    assert len(pieces(whole)) == 120
    last = len(whole) - 1
    for at in (1, 4, 7, last):
        loader = make()
        batches = iter(loader)
        for _ in range(at):
            next(batches)

        assert_continues(make(), json.dumps(loader.state_dict()), whole[at:])


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iteration_beside_a_later_one_is_refused_and_the_later_one_is_whole(num_workers):
    whole = list(PackedDataLoader(dataset(), num_workers=num_workers))
    loader = PackedDataLoader(dataset(), num_workers=num_workers)
    first = iter(loader)
    second = iter(loader)
    got = [next(second)]
    with pytest.raises(ConfigError, match="a later iteration of this loader has begun"):
        next(first)
    got += second
    assert same(got, whole)


@pytest.mark.processes
def test_an_iteration_after_a_dead_worker_does_not_go_back_to_the_state():
    loader = PackedDataLoader(dataset(), num_workers=2)
    next(iter(loader))
    resumed = PackedDataLoader(dataset(), num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    batches = iter(resumed)
    next(batches)
    for worker in multiprocessing.active_children():
        worker.kill()
    with pytest.raises(WorkerError, match="died"):
        list(batches)

    assert {batch["epoch"] for batch in resumed} == {1}


LOADERS = {
    "torch": lambda dataset, num: DataLoader(dataset, batch_size=None, num_workers=num),
    "ours": lambda dataset, num: PackedDataLoader(dataset, num_workers=num),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_workers_refuse_a_state_that_was_loaded_beside_them_and_is_not_theirs(kind):
    original = dataset()
    next(iter(original))
    resumed = dataset()
    resumed.load_state_dict(original.state_dict())
    loader = LOADERS[kind](resumed, 2)

    with pytest.raises(ResumeError, match=r"of worker 0 of 1, but is loaded in [01] of 2; .* as"):
        list(loader)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_worker_goes_on_once_from_a_state_that_was_loaded_beside_it(kind):
    original = dataset()
    next(iter(original))
    rest = len(list(dataset())) - 1
    resumed = dataset()
    resumed.load_state_dict(original.state_dict())
    loader = LOADERS[kind](resumed, 1)

    got = [[int(batch["epoch"]) for batch in loader] for _ in range(2)]
    assert got == [[0] * rest, [1] * (rest + 1)]
    # This process still has the loaded state, but must not resume from it a second time.
    assert {int(batch["epoch"]) for batch in resumed} == {2}


@pytest.mark.processes
@pytest.mark.parametrize("has_iterated", [False, True])
def test_a_state_is_refused_where_workers_of_another_loader_iterate(has_iterated):
    ours = dataset()
    if has_iterated:
        next(iter(ours))
    batches = iter(DataLoader(ours, batch_size=None, num_workers=1))
    next(batches)

    with pytest.raises(ResumeError, match=r"delivered by a loader.*; use PackedDataLoader or"):
        ours.state_dict()
    ours.set_epoch(3)
    assert ours.state_dict()["epoch"] == 3


TEXTS = {"tokenizer": ByChar()}
LABELS = {"labels": "labels", "labels_shifted": False}
IMAGES = {"payloads": Payloads({"images": "spans"})}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"tokens": "ids"}, r"tokens=\['tokens'\], but this dataset has tokens=\['ids'\]"),
        (TEXTS, TEXTS | {"text": "body"}, r"text=\['text'\], but .* text=\['body'\]"),
        ({}, LABELS, r"labels=\[None\], but .* labels=\['labels'\]"),
        (LABELS, LABELS | {"labels_shifted": True}, r"labels_shifted=\[False\], but .*=\[True\]"),
        ({"loss_mask": "mask"}, {"loss_mask": "m"}, r"loss_mask=\['mask'\], but .*=\['m'\]"),
        (
            {"token_fields": {"w": "int32"}},
            {"token_fields": {"w": "f4"}},
            r"token_fields=\[{'w': 'i",
        ),
        (
            IMAGES,
            {"payloads": Payloads({"images": None})},
            r"payloads=\[{'images': 'spans'}\], but .*: None",
        ),
        (
            IMAGES,
            {"payloads": Payloads({"images": "spans"}, split=True)},
            r"split_payloads=\[False\], but .*=\[True\]; .* Payloads\(\.\.\., split=\)",
        ),
        (
            IMAGES,
            {"payloads": Payloads({"images": "spans"}, cost=len)},
            r"length_fns=\[False\], but .*=\[True\]; .* Payloads\(\.\.\., cost=\)",
        ),
        (
            {},
            {"on_bad_row": "skip"},
            r"on_bad_sample=\['raise'\], but .*=\['skip'\]; .* on_bad_row:",
        ),
        ({}, {"sharded": True}, r"sharded=\[False\], but .*=\[True\]"),
        ({"repeat": 1.5}, {"repeat": 2}, r"repeats=\[1.5\], but this dataset has repeats=\[2.0\]"),
        ({"proportion": 3}, {"choose": 3}, r"are_quotas=False, but .*are_quotas=True"),
    ],
)
def test_a_state_is_refused_where_samples_are_read_or_counted_otherwise(before, after, message):
    make = lambda options: PackedIterableDataset(  # noqa: E731
        [IterableStream(Again([]), name="a", **options)], packing=Packing(max_seq_len=32)
    )
    state = json.loads(json.dumps(make(before).state_dict()))
    make(before).load_state_dict(state)

    with pytest.raises(ResumeError, match=message):
        make(after).load_state_dict(state)


def test_a_state_fits_where_what_differs_does_not_decide_the_batches():
    make = lambda **options: PackedIterableDataset(  # noqa: E731
        [IterableStream(Again([]), name="a", **options)], packing=Packing(max_seq_len=32)
    )
    make(text="body", on_bad_row=3, repeat=2.0).load_state_dict(
        make(replay=True, on_bad_row=9, repeat=2).state_dict()
    )
    make(token_fields={"w": "f4"}).load_state_dict(
        make(token_fields={"w": np.dtype("float32")}).state_dict()
    )


def places_in(node, above=()):
    """Where each value of a state is; what sources say of themselves is theirs."""
    if above:
        yield above
    numbered = enumerate(node) if isinstance(node, list) else ()
    for key, value in node.items() if isinstance(node, dict) else numbered:
        yield from [] if key == "sources" else places_in(value, (*above, key))


def changed(state, path, value):
    """A state whose value at a path is another; DELETED: it has none there."""
    state = node = json.loads(json.dumps(state))
    for key in path[:-1]:
        node = node[key]
    if value is DELETED:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return state


DELETED = object()


@pytest.fixture(scope="module")
def after_9():
    loader = PackedDataLoader(dataset(WithState), prefetch_threads=0)
    list(islice(loader, 9))
    return loader.state_dict()


@pytest.mark.parametrize("value", [DELETED, "x", -1, 2**70])
def test_no_damage_of_a_state_is_an_error_of_anyone_elses(after_9, value):
    loader = PackedDataLoader(dataset(WithState), prefetch_threads=0)
    for path in places_in(after_9["workers"][0]):
        with pytest.raises(ResumeError, match=r"unchanged|this release reads 8"):
            loader.load_state_dict(changed(after_9, ("workers", 0, *path), value))
    assert loader.stats()["packs"] == 0


def test_workers_send_a_window_once_and_a_state_of_lists_has_at_most_four_kilobytes():
    rows = [np.arange(n % 700 + 1) for n in range(20_000)]
    made = PackedIterableDataset(
        [IterableStream(rows, name=name, proportion=1) for name in "ab"],
        packing=Packing(max_seq_len=2048),
        batch_size=8,
    )
    engine = engine_of(made)
    with engine.iteration(engine.begin()) as start:
        position = engine.whole_position(start)
        changes = [change for *_, change in engine.deliveries(start, position.states[0])]
    sent = [change["flow"]["queues"][0] is not None for change in changes]
    assert sent[0]
    assert sum(sent) < len(sent) // 3
    for change in changes:
        position = position.after(0, change)
        assert len(json.dumps(position.saved().states[0])) <= 4096


@pytest.mark.parametrize("kind", [list, Again, WithState])
def test_a_resume_counts_no_bad_sample_twice_and_warns_of_none_again(kind, caplog):
    rows = rows_of(0, [9] * 900)
    for number in range(3, 900, 10):
        rows[number] = [-1]

    def loader():
        stream = IterableStream(kind(rows), name="a", on_bad_row=90)
        made = PackedIterableDataset([stream], packing=Packing(max_seq_len=32))
        return PackedDataLoader(made, prefetch_threads=0)

    whole = loader()
    batches = list(whole)
    assert whole.stats()["streams"]["a"]["skipped"] == 90
    caplog.clear()
    made = loader()
    for _ in range(5):
        list(islice(made, 3))
        state = json.loads(json.dumps(made.state_dict()))
        made = loader()
        made.load_state_dict(state)
    rest = list(made)
    assert same(rest, batches[15:])
    assert made.stats()["streams"]["a"]["skipped"] == 90
    warned = [record.getMessage() for record in caplog.records if "skipped bad" in record.msg]
    assert len(warned) == len(set(warned)) == 90
