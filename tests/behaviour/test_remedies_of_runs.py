"""Remedies of plans, loaders, states, iterables, conversations and length files, applied.

::

    refuse() --> message --a regular expression--> the remedy's words --> apply(words) --> no error

The expressions hold on to options and values, not to prose.
"""

from __future__ import annotations

import ast
import copy
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import streaming
from torch.utils.data import DataLoader

import streampack
from streampack import (
    BucketedIterableDataset,
    Bucketing,
    Buffers,
    Chapter,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.write import ChatEncoder, write_stream
from streampack.write.lengths import write_lengths
from streampack.write.remote import write_remote_lengths
from tests.helpers.builders import write_stream_files
from tests.helpers.remedies import PACKING, ROWS, Remedy, mds, packed, untried
from tests.helpers.verbs import call_verb
from tests.helpers.words import words

COMPLETE = ("loader/loader.py", "planned/dataset.py", "plan/pack_queue.py", "online/loading.py")
COMPLETE += ("online/samples.py", "online/state.py", "planned/pack_lengths.py")
COMPLETE += ("online/even_steps.py",)
COMPLETE += ("write/chat.py", "write/chat_spans.py", "write/lengths.py")
State = dict[str, Any]

# Planned runs.


def planned(folder: Path, **options: Any) -> PackedStreamingDataset:
    options = {"packing": PACKING, **options}
    return PackedStreamingDataset([Stream(local=mds(folder))], **options)


def saved(folder: Path, steps: int = 1, **options: Any) -> State:
    """Return the state of a planned run after some steps."""
    loader = PackedDataLoader(planned(folder, **options))
    for _ in islice(loader, steps):
        pass
    return loader.state_dict()


def resume(folder: Path, state: State, **options: Any) -> int:
    """Continue a planned run to its epoch's end; return its steps."""
    loader = PackedDataLoader(planned(folder, **options))
    loader.load_state_dict(state)
    steps = len(list(loader))
    assert steps
    return steps


def unchanged(folder: Path, *_: str) -> int:
    return resume(folder, saved(folder))


def changed(**fields: Any) -> Callable[[Path], Any]:
    """Return what resumes from a state with other fields."""
    return lambda folder: resume(folder, saved(folder) | fields)


def served(dataset: Any) -> Any:
    """Let a worker of torch's own loader deliver a batch; return it."""
    return next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))


def without(state: State, key: str) -> State:
    return {name: value for name, value in state.items() if name != key}


def of_lengths(
    folder: Path,
    max_seq_len: int = 64,
    *,
    state: State | None = None,
    mixing: dict[str, Any] | None = None,
    **options: Any,
) -> PackedStreamingDataset:
    """Deliver an epoch, or the rest of one, of two streams with packs of different lengths."""
    dataset = PackedStreamingDataset(
        [
            Stream(local=mds(folder)),
            Stream(local=mds(folder, "input_ids"), max_seq_len=max_seq_len),
        ],
        packing=options.pop("packing", PACKING),
        mixing=Mixing(**{"batching_method": "device_per_stream", **(mixing or {})}),
        **{"batch_size": 4, "world": World(), **options},
    )
    if state is not None:
        dataset.load_state_dict(state)
    assert list(dataset)
    return dataset


def begun(folder: Path, **options: Any) -> State:
    """Return the state at the start of such a run."""
    dataset = of_lengths(folder, **options)
    dataset.set_epoch(0)
    return dataset.state_dict()


def lanes_of(folder: Path, lengths: list[int], num_lanes: int = 2, epoch_end: str = "pad") -> Any:
    """Return the first batch of a stream whose samples repeat these lengths."""
    path = folder / "-".join(map(str, lengths))
    if not path.exists():
        write_stream_files(path, 100 * lengths, encoding="bytes", lengths_file=False)
    dataset = PackedStreamingDataset(
        [Stream(local=path, tokens_dtype="int32")],
        packing=PACKING,
        mixing=Mixing(epoch_end=epoch_end, epoch_size=200, global_batch_size=2),
        order=Order(num_lanes=num_lanes),
        world=World(),
    )
    return next(iter(dataset))


def asked_by_accelerate(rank: int) -> State:
    """Return what accelerate's save_state gets from one of two ranks of an iterable run."""
    world = World(rank=rank, num_ranks=2)
    loader = PackedDataLoader(
        PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, world=world)
    )
    names: dict[str, Any] = {"__name__": "accelerate.checkpointing", "loader": loader}
    exec("state = loader.state_dict()", names)
    return names["state"]


def saved_by_rank(index: str) -> list[State]:
    """Save the state of each rank under its process_index, and load it in the same rank."""
    assert index == "process_index"
    loaders = [
        PackedDataLoader(
            PackedIterableDataset(
                [IterableStream(ROWS)], packing=PACKING, world=World(rank=rank, num_ranks=2)
            )
        )
        for rank in range(2)
    ]
    states = {rank: loader.state_dict() for rank, loader in enumerate(loaders)}
    for rank, loader in enumerate(loaders):
        loader.load_state_dict(states[rank])
    return list(states.values())


UNCHANGED = r"state_dict\(\)"
EACH = Mixing(batching_method="per_stream", global_batch_size=2)
CARRY = Mixing(epoch_end="carry", global_batch_size=2)
STATES = {
    "a state of rank 0 for all": Remedy(
        lambda _: asked_by_accelerate(1),
        r"save loader\.state_dict\(\) of every rank under accelerator\.(\w+), and load ",
        lambda _, index: saved_by_rank(index),
    ),
    "a damaged position": Remedy(
        changed(position=-1), rf"position.* -1,.*{UNCHANGED} or (state_after)\(batch\)", unchanged
    ),
    "a state without a fingerprint": Remedy(
        lambda folder: resume(folder, without(saved(folder), "fingerprint")),
        rf"fingerprint.*{UNCHANGED}",
        unchanged,
    ),
    "a worker that is not a pair": Remedy(
        changed(worker=3), rf"worker is 3, .*{UNCHANGED}", unchanged
    ),
    "something else as a state": Remedy(
        lambda folder: resume(folder, {"step": 3}),
        rf"PackedStreamingDataset: .*'step'.*{UNCHANGED} or (state_after)\(batch\)",
        lambda folder, name: [
            unchanged(folder),
            resume(folder, getattr(planned(folder), name)(next(iter(planned(folder))))),
        ],
    ),
    "a state of iterables": Remedy(
        lambda folder: resume(folder, online().dataset.state_dict()),
        rf"PackedStreamingDataset; .*{UNCHANGED}",
        unchanged,
    ),
    "a version of the future": Remedy(changed(version=99), rf"version 99.*{UNCHANGED}", unchanged),
    "a position after the epoch's end": Remedy(
        changed(position=10**6), rf"position 1000000 .*{UNCHANGED}", unchanged
    ),
    "snapshots that are damaged": Remedy(
        changed(snapshots="[3]"),
        r"'(snapshots)' out",
        lambda folder, key: resume(folder, without(saved(folder), key)),
    ),
    "a batch size that does not divide the position": Remedy(
        lambda folder: resume(folder, saved(folder, 3), batch_size=2),
        r"position 3 .*batch_size=2; set batch_size to (\d+) or (\d+)",
        lambda folder, *sizes: [
            resume(folder, saved(folder, 3), batch_size=int(size)) for size in sizes
        ],
    ),
    "a pack that is not a multiple": Remedy(
        lambda folder: of_lengths(folder, 40),
        r"max_seq_len=40 .*; set it to (\d+) or (\d+), or leave it out",
        lambda folder, *sizes: [
            of_lengths(folder, int(size), batch_size=6) for size in (*sizes, 16)
        ],
    ),
    "longer packs in batches of several streams": Remedy(
        lambda folder: of_lengths(folder, mixing={"batching_method": "random"}),
        r"'random' .* to '(\w+)' or '(\w+)', or leave the stream's max_seq_len out",
        lambda folder, *methods: [
            of_lengths(folder, mixing={"batching_method": method}) for method in methods
        ],
    ),
    "a pack that is longer than a device batch": Remedy(
        lambda folder: of_lengths(folder, batch_size=6),
        r"begin the run with batch_size=(\d+), or shorten",
        lambda folder, size: [of_lengths(folder, batch_size=int(size)), of_lengths(folder, 32)],
    ),
    "global batches of one stream that are not whole runs": Remedy(
        lambda folder: of_lengths(
            folder,
            state=begun(folder, batch_size=8, mixing={"batching_method": "per_stream"}),
            mixing={"batching_method": "per_stream", "global_batch_size": 12},
        ),
        r"global_batch_size=12 to be a multiple of .*batch_size=8; set it to (\d+)",
        lambda folder, size: of_lengths(
            folder,
            state=begun(folder, batch_size=8, mixing={"batching_method": "per_stream"}),
            mixing={"batching_method": "per_stream", "global_batch_size": int(size)},
        ),
    ),
    "a world whose batches would mix lengths": Remedy(
        lambda folder: of_lengths(folder, state=begun(folder, batch_size=8), batch_size=16),
        r"divisor of .*=8; set it to (\d+) or (\d+), on any number of ranks",
        lambda folder, *sizes: [
            of_lengths(folder, state=begun(folder, batch_size=8), batch_size=int(size))
            for size in sizes
        ],
    ),
    "an end that drops a whole stream of longer packs": Remedy(
        lambda folder: of_lengths(folder, batch_size=16, mixing={"epoch_end": "drop"}),
        r"set epoch_end to '(\w+)' or '(\w+)', or raise its share",
        lambda folder, *ends: [
            of_lengths(folder, mixing={"epoch_end": end, "global_batch_size": 4}) for end in ends
        ],
    ),
    "other lengths of streams' packs": Remedy(
        lambda folder: of_lengths(folder, 32, state=begun(folder)),
        r"=\[16, (\d+)\], .* resume with the max_seq_len of each Stream",
        lambda folder, size: of_lengths(folder, int(size), state=begun(folder)),
    ),
    "a global batch that does not divide the position": Remedy(
        lambda folder: resume(folder, saved(folder, 3), mixing=Mixing(global_batch_size=2)),
        r"global_batch_size=1, .* 2, .* position 3 .* (\d+) or (\d+), or leave it out to keep 1",
        lambda folder, *sizes: [
            resume(folder, saved(folder, 3)),
            *(
                resume(folder, saved(folder, 3), mixing=Mixing(global_batch_size=int(size)))
                for size in sizes
            ),
        ],
    ),
    "another global batch of one stream": Remedy(
        lambda folder: resume(
            folder,
            saved(folder, 2, mixing=EACH),
            mixing=Mixing(batching_method="per_stream", global_batch_size=4),
        ),
        r"'per_stream' .*leave it out to keep 2, or change it at the start of an epoch",
        lambda folder: [
            resume(
                folder, saved(folder, 2, mixing=EACH), mixing=Mixing(batching_method="per_stream")
            ),
            resume(
                folder,
                saved(folder, 0, mixing=EACH),
                mixing=Mixing(batching_method="per_stream", global_batch_size=4),
            ),
        ],
    ),
    "another global batch of epochs that carry": Remedy(
        lambda folder: resume(
            folder,
            saved(folder, 99, mixing=CARRY),
            mixing=Mixing(epoch_end="carry", global_batch_size=3),
        ),
        r"epoch_end='carry' .*leave it out to keep 2",
        lambda folder: resume(
            folder, saved(folder, 99, mixing=CARRY), mixing=Mixing(epoch_end="carry")
        ),
    ),
    "another number of lanes": Remedy(
        lambda folder: resume(folder, saved(folder), order=Order(num_lanes=2)),
        r"num_lanes=1, .* 2; .*: set (\d+), or leave it out",
        lambda folder, lanes: [
            resume(folder, saved(folder), order=Order(num_lanes=int(lanes))),
            unchanged(folder),
        ],
    ),
    "a dataset whose batches workers delivered": Remedy(
        lambda folder: (served(dataset := planned(folder)), dataset.state_dict()),
        r"dataset\.(state_after)\(batch\) .*loader\.(state_dict)\(\)",
        lambda folder, after, of_loader: [
            resume(folder, getattr(dataset := planned(folder), after)(served(dataset))),
            resume(folder, getattr(PackedDataLoader(planned(folder)), of_loader)()),
        ],
    ),
    "a batch without its position": Remedy(
        lambda folder: planned(folder).state_after({"tokens": 1, "epoch": 0}),
        r"no position; pass a batch as delivered.* loader\.state_dict\(\)",
        lambda folder: [
            resume(folder, planned(folder).state_after(next(iter(planned(folder))))),
            unchanged(folder),
        ],
    ),
    "a worker's state in the training process": Remedy(
        changed(worker=[0, 2]),
        r"worker 0 of 2.* dataset\.(state_after)\(batch\)",
        lambda folder, name: resume(
            folder, getattr(planned(folder), name)(next(iter(planned(folder))))
        ),
    ),
    "a worker's state of other steps": Remedy(
        lambda folder: list(DataLoader(InWorker(folder, 2), batch_size=None, num_workers=1)),
        r"batch_size=2 .* dataset\.state_after\(batch\)",
        lambda folder: [
            list(DataLoader(InWorker(folder, 1), batch_size=None, num_workers=1)),
            resume(folder, planned(folder).state_after(next(iter(planned(folder))))),
        ],
    ),
}


class InWorker:
    """Iterated in a worker: resumes there from a worker's state of steps of one pack."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        self._state = saved(folder) | {"worker": [0, 1], "window": 1}
        self._dataset = planned(folder, batch_size=batch_size)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        self._dataset.load_state_dict(self._state)
        return number


EPOCHS = {
    "an empty sample in several lanes": Remedy(
        lambda folder: lanes_of(folder, [3, 0, 5]),
        r"num_lanes, .*: run `streampack (\w+)` on it$",
        lambda folder, verb: [
            call_verb(verb, folder / "3-0-5", "--tokens-dtype", "int32"),
            lanes_of(folder, [3, 0, 5]),
        ],
    ),
    "samples that are all empty": Remedy(
        lambda folder: lanes_of(folder, [0, 0], num_lanes=1, epoch_end="carry"),
        r"leave the stream out, or write it with tokens$",
        lambda folder: lanes_of(folder, [2, 3], num_lanes=1, epoch_end="carry"),
    ),
    "an epoch of samples that are all dropped": Remedy(
        lambda folder: list(planned(folder, packing=Packing(max_seq_len=2, overflow="drop"))),
        r"max_seq_len=2.* raise max_seq_len, or set overflow to (\w+) or (\w+)$",
        lambda folder, *ways: [
            list(planned(folder, packing=Packing(max_seq_len=4, overflow="drop"))),
            *(list(planned(folder, packing=Packing(max_seq_len=2, overflow=w))) for w in ways),
        ],
    ),
    "an epoch without a whole batch": Remedy(
        lambda folder: list(
            planned(folder, mixing=Mixing(epoch_end="drop", global_batch_size=100))
        ),
        r"global_batch_size=100; lower it, raise epoch_size, or set epoch_end='(\w+)'$",
        lambda folder, end: [
            list(planned(folder, mixing=Mixing(epoch_end="drop", global_batch_size=1))),
            list(planned(folder, mixing=Mixing(epoch_end=end, global_batch_size=100))),
            packed(
                [Stream(local=mds(folder), proportion=1)],
                mixing=Mixing(epoch_end="drop", global_batch_size=100, epoch_size=2000),
            ),
        ],
    ),
    **{
        f"{name} that is too small": Remedy(
            lambda folder, name=name: list(
                PackedDataLoader(planned(folder, buffers=Buffers(**{name: 1})))
            ),
            rf"{name}=1\) .*set {name} to at least (\d+)",
            lambda folder, least, name=name: list(
                PackedDataLoader(planned(folder, buffers=Buffers(**{name: int(least)})))
            ),
        )
        for name in ("worker_tokens", "worker_bytes", "rank_tokens")
    },
}

# Loaders.


def two_at_a_time(loader: Any) -> None:
    """Begin a second iteration, and continue the first."""
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    next(first)


def one_after_the_other(loader: Any) -> None:
    assert list(loader)
    assert list(loader)


LOADERS = {
    "a loader of something else": Remedy(
        lambda _: PackedDataLoader(ROWS),
        r"got list; .* DataLoader\(dataset, batch_size=(None)\)$",
        lambda _, __: list(DataLoader(ROWS, batch_size=None)),
    ),
    "a negative timeout": Remedy(
        lambda folder: PackedDataLoader(planned(folder), timeout=-1),
        r"timeout=-1 .*; (0) or (None) ",
        lambda folder, *values: [
            list(PackedDataLoader(planned(folder), timeout=ast.literal_eval(v))) for v in values
        ],
    ),
    "a timeout of threads": Remedy(
        lambda folder: PackedDataLoader(planned(folder), timeout=5),
        r"timeout=5 .* num_workers=0 .*leave it out, or set (num_workers)\b",
        lambda folder, name: [
            list(PackedDataLoader(planned(folder))),
            list(PackedDataLoader(planned(folder), timeout=30, **{name: 1})),
        ],
    ),
    "other weights for a run of epochs": Remedy(
        lambda folder: PackedDataLoader(planned(folder)).amend(weights={"mds-tokens": 1}),
        r"pass chapters=\[Chapter\(weights=\{...\}\)\] to the PackedStreamingDataset$",
        lambda folder: PackedDataLoader(
            planned(
                folder,
                chapters=[Chapter(weights={"mds-tokens": 1}, steps=4)],
                mixing=Mixing(global_batch_size=1),
            )
        ).amend(weights={"mds-tokens": 1}),
    ),
    "fewer than no threads": Remedy(
        lambda folder: PackedDataLoader(planned(folder), prefetch_threads=-1),
        r"prefetch_threads=-1 .*; (0) ",
        lambda folder, value: list(PackedDataLoader(planned(folder), prefetch_threads=int(value))),
    ),
    "fewer than no workers": Remedy(
        lambda folder: PackedDataLoader(planned(folder), num_workers=-1),
        r"num_workers=-1 .*; (0) ",
        lambda folder, value: list(PackedDataLoader(planned(folder), num_workers=int(value))),
    ),
    "a number ahead that is missing": Remedy(
        lambda folder: PackedDataLoader(planned(folder), prefetch_factor=None),
        r"prefetch_factor=None .*leave it out",
        lambda folder: list(PackedDataLoader(planned(folder))),
    ),
    "a start method that is misspelt": Remedy(
        lambda folder: PackedDataLoader(
            planned(folder), num_workers=1, multiprocessing_context="frok"
        ),
        r"did you mean '(\w+)'\?$",
        lambda folder, name: list(
            PackedDataLoader(planned(folder), num_workers=1, multiprocessing_context=name)
        ),
    ),
    "two iterations of a loader with workers": Remedy(
        lambda folder: two_at_a_time(PackedDataLoader(planned(folder), num_workers=1)),
        r"end one before the next, or make a (PackedDataLoader) for each$",
        lambda folder, _: [
            one_after_the_other(PackedDataLoader(planned(folder), num_workers=1)),
            both(*(PackedDataLoader(planned(folder), num_workers=1) for _ in range(2))),
        ],
    ),
    "two iterations of iterables": Remedy(
        lambda _: two_at_a_time(PackedIterableDataset([IterableStream(ROWS)], packing=PACKING)),
        r"end one before the next, or make a dataset for each$",
        lambda _: [
            one_after_the_other(PackedIterableDataset([IterableStream(ROWS)], packing=PACKING)),
            both(
                *(PackedIterableDataset([IterableStream(ROWS)], packing=PACKING) for _ in range(2))
            ),
        ],
    ),
    "two iterations of a loader of iterables": Remedy(
        lambda _: two_at_a_time(online()),
        r"end one before the next, or make a dataset(?: and a loader)? for each$",
        lambda _: [one_after_the_other(online()), both(online(), online())],
    ),
    "torch's loader that would stack batches": Remedy(
        lambda folder: next(iter(DataLoader(planned(folder), batch_size=2, num_workers=1))),
        r"batch_size=2 .*batch_size=(None)\)",
        lambda folder, _: served(planned(folder, batch_size=2)),
    ),
}


def both(first: Any, second: Any) -> None:
    """Iterate two loaders in turns."""
    assert len(list(zip(first, second, strict=True)))


# Iterables.


class Unsized:
    """Can be iterated again, and has no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def flow(*streams: IterableStream, **options: Any) -> int:
    return packed(list(streams), **options)


def online(num_workers: int = 0, **options: Any) -> PackedDataLoader:
    dataset = PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, **options)
    return PackedDataLoader(dataset, num_workers=num_workers)


def saved_online(**options: Any) -> State:
    loader = online(**options)
    next(iter(loader))
    return loader.state_dict()


def resume_online(state: State, **options: Any) -> None:
    loader = online(**options)
    loader.load_state_dict(state)
    assert list(loader)


def changed_online(part: str, **fields: Any) -> Callable[[Path], Any]:
    """Return what resumes from a state with other fields in the loader's, worker's or flow's."""

    def refuse(_: Path) -> None:
        state = copy.deepcopy(saved_online())
        worker = state["workers"][0]
        {"loader": state, "worker": worker, "flow": worker["flow"]}[part].update(fields)
        resume_online(state)

    return refuse


def unchanged_online(*_: Any) -> None:
    resume_online(saved_online())


def with_picture(length: int, span: list[int], **options: Any) -> IterableStream:
    """Samples of so many tokens, of which some stand for a picture."""
    row = {"tokens": list(range(1, length + 1)), "image": ["x"], "spans": [span]}
    return IterableStream([row] * 4, payloads={"image": "spans"}, **options)


def as_packing(stream: IterableStream, **options: Any) -> int:
    return len(list(PackedIterableDataset([stream], packing=Packing(**options))))


def bad_rows(most: int) -> IterableStream:
    return IterableStream([[1], [], [2], [], [3]], on_bad_sample="skip", max_bad_samples=most)


def ranked(num_ranks: int, state: State | None = None) -> PackedIterableDataset:
    world = World(rank=0, num_ranks=num_ranks)
    dataset = PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, world=world)
    if state is not None:
        dataset.load_state_dict(state)
    next(iter(dataset))
    return dataset


RESUMED = {
    "a planned state": Remedy(
        lambda folder: resume_online(saved(folder)), UNCHANGED, unchanged_online
    ),
    "a planned state in a dataset": Remedy(
        lambda folder: ranked(1, saved(folder)),
        rf"PackedIterableDataset; .*{UNCHANGED}",
        lambda _: ranked(1, ranked(1).state_dict()),
    ),
    "a version of the future": Remedy(
        changed_online("worker", version=99), r"version 99", unchanged_online
    ),
    "a state of other workers": Remedy(
        lambda _: resume_online(saved_online(), num_workers=1),
        r"num_workers=0, .*num_workers=1; .*with num_workers=(\d+)$",
        lambda _, number: resume_online(saved_online(), num_workers=int(number)),
    ),
    "a worker that is not there": Remedy(
        changed_online("loader", next_worker=7),
        rf"next_worker is 7, .*{UNCHANGED}",
        unchanged_online,
    ),
    "a state of no workers": Remedy(
        changed_online("loader", workers=[]), UNCHANGED, unchanged_online
    ),
    "an epoch that is none": Remedy(
        changed_online("worker", epoch=-1), rf"epoch is -1, .*{UNCHANGED}", unchanged_online
    ),
    "counts that contradict": Remedy(
        changed_online("flow", num_batches=10**6),
        rf"1000000 batches.*{UNCHANGED}",
        unchanged_online,
    ),
    "another batch size": Remedy(
        lambda _: resume_online(saved_online(), batch_size=2),
        r"batch_size=(\d+), .*batch_size=2; .* without the state$",
        lambda _, size: [
            resume_online(saved_online(), batch_size=int(size)),
            list(online(batch_size=2)),
        ],
    ),
    "another number of ranks": Remedy(
        lambda _: ranked(1, ranked(2).state_dict()),
        r" 0 of (\d+), .* 0 of 1; ",
        lambda _, ranks: ranked(int(ranks), ranked(2).state_dict()),
    ),
    "batches of another loader's workers": Remedy(
        lambda _: (served(dataset := online().dataset), dataset.state_dict()),
        r"(PackedDataLoader) .*loader's (state_dict)\(\)$",
        lambda _, loader, name: resume_online(
            getattr(getattr(streampack, loader)(online().dataset), name)()
        ),
    ),
}
ONCE = r"; pass a list, .* __iter__ makes a new generator$"
ITERABLES = {
    "an option of planned epochs": Remedy(
        lambda _: flow(IterableStream(ROWS), mixing=Mixing(epoch_end="carry")),
        r"epoch_end='carry', only '(\w+)'.*; (PackedStreamingDataset) can",
        lambda folder, end, name: [
            flow(IterableStream(ROWS), mixing=Mixing(epoch_end=end)),
            list(
                getattr(streampack, name)(
                    [Stream(local=mds(folder))], packing=PACKING, mixing=Mixing(epoch_end="carry")
                )
            ),
        ],
    ),
    "lanes of iterables": Remedy(
        lambda _: flow(IterableStream(ROWS), order=Order(num_lanes=2)),
        r"num_lanes=2, only (None); (PackedStreamingDataset) can",
        lambda folder, _, __: [
            flow(IterableStream(ROWS), order=Order(num_lanes=None)),
            packed([Stream(local=mds(folder))], order=Order(num_lanes=2)),
        ],
    ),
    "a generator in epochs of a size": Remedy(
        lambda _: flow(IterableStream(iter(ROWS), proportion=1), mixing=Mixing(epoch_size=50)),
        rf"epoch_size=50 .*{ONCE}",
        lambda _: [
            flow(IterableStream(source, proportion=1), mixing=Mixing(epoch_size=50))
            for source in (ROWS, Unsized())
        ],
    ),
    "sizes that are not known": Remedy(
        lambda _: flow(
            IterableStream(ROWS), IterableStream(Unsized()), mixing=Mixing(epoch_size=50)
        ),
        r"epoch_size=50 .*give every stream a (proportion)$",
        lambda _, name: flow(
            IterableStream(ROWS, **{name: 1}),
            IterableStream(Unsized(), **{name: 1}),
            mixing=Mixing(epoch_size=50),
        ),
    ),
    "passes in tokens": Remedy(
        lambda _: flow(IterableStream(ROWS, repeat=2), mixing=Mixing(weight_unit="tokens")),
        r"repeat=2 .*give it (choose)=, all streams a (proportion), or set weight_unit='(\w+)'$",
        lambda _, choose, proportion, unit: [
            flow(IterableStream(ROWS, **{choose: 50}), mixing=Mixing(weight_unit="tokens")),
            flow(IterableStream(ROWS, **{proportion: 1}), mixing=Mixing(weight_unit="tokens")),
            flow(IterableStream(ROWS, repeat=2), mixing=Mixing(weight_unit=unit)),
        ],
    ),
    "packs of a stream of unknown size": Remedy(
        lambda _: stratified({"repeat": 1}, {"repeat": 1}),
        r"'stratified' .*give it (choose)=, or all streams a (proportion)$",
        lambda _, choose, proportion: [
            stratified({"repeat": 1}, {choose: 9}),
            stratified({proportion: 1}, {proportion: 1}),
        ],
    ),
    "no samples at all": Remedy(
        lambda _: flow(IterableStream(ROWS, choose=0)),
        r"raise repeat or choose, or pass ",
        lambda _: [flow(IterableStream(ROWS, choose=3)), flow(IterableStream(ROWS, repeat=1))],
    ),
    "more bad samples than allowed": Remedy(
        lambda _: flow(bad_rows(1)),
        r"(max_bad_samples)=1 ",
        lambda _, __: flow(bad_rows(2)),
    ),
    "an empty source": Remedy(
        lambda _: flow(IterableStream(ROWS), IterableStream([])),
        r"empty; leave the stream out$",
        lambda _: flow(IterableStream(ROWS)),
    ),
    "a generator in a second epoch": Remedy(
        lambda _: one_after_the_other(
            PackedIterableDataset([IterableStream(iter(ROWS))], packing=PACKING)
        ),
        r"; pass something that can be iterated again: .* __iter__ makes a new generator$",
        lambda _: [
            one_after_the_other(PackedIterableDataset([IterableStream(source)], packing=PACKING))
            for source in (ROWS, Unsized())
        ],
    ),
    "one field of two types": Remedy(
        lambda _: flow(*weighted("float32", "int64")),
        r"'float32' .* 'int64' .*give it one dtype$",
        lambda _: flow(*weighted("float32", "float32")),
    ),
    "pictures in packs that are cut": Remedy(
        lambda _: as_packing(with_picture(4, [0, 2]), max_seq_len=16, method="concat"),
        r"method='concat' .*method='(\w+)' without split_gap$",
        lambda _, method: as_packing(with_picture(4, [0, 2]), max_seq_len=16, method=method),
    ),
    "a sample with a picture that is too long": Remedy(
        lambda _: as_packing(with_picture(20, [0, 2]), max_seq_len=16),
        r"(split_payloads)=(True) .*overflow to (\w+) or (\w+), or raise max_seq_len$",
        lambda _, name, __, *ways: [
            as_packing(with_picture(20, [0, 2], **{name: True}), max_seq_len=16),
            as_packing(with_picture(20, [0, 2]), max_seq_len=16, overflow=ways[0]),
            as_packing(with_picture(20, [0, 2]), max_seq_len=20),
            Packing(max_seq_len=16, overflow=ways[1]),  # all four samples would be dropped
        ],
    ),
    "a picture that is too long": Remedy(
        lambda _: as_packing(with_picture(20, [0, 20], split_payloads=True), max_seq_len=16),
        r"20 tokens.* max_seq_len=16 .*raise max_seq_len$",
        lambda _: as_packing(with_picture(20, [0, 20], split_payloads=True), max_seq_len=20),
    ),
    "a bucketing of another kind": Remedy(
        lambda _: BucketedIterableDataset([IterableStream(ROWS)], bucketing={"max_tokens": 8}),
        r"bucketing=streampack\.(Bucketing)\(max_tokens=(\d+)\)$",
        lambda _, name, size: list(
            BucketedIterableDataset(
                [IterableStream(ROWS)], bucketing=getattr(streampack, name)(max_tokens=int(size))
            )
        ),
    ),
    "a field that bucketed batches have": Remedy(
        lambda _: bucketed("seq_lens"),
        r"'seq_lens'.*give it another name in the source$",
        lambda _: bucketed("weights"),
    ),
}


def stratified(sized: dict[str, int], unsized: dict[str, int]) -> int:
    streams = [IterableStream(ROWS, **sized), IterableStream(Unsized(), **unsized)]
    return flow(*streams, mixing=Mixing(batching_method="stratified"))


def weighted(*dtypes: str) -> list[IterableStream]:
    rows = [{"tokens": [1, 2], "w": [1, 1]}] * 9
    return [IterableStream(rows, token_fields={"w": dtype}) for dtype in dtypes]


def bucketed(field: str) -> int:
    stream = IterableStream([{"tokens": [1, 2], field: [1, 1]}] * 9, token_fields={field: "int64"})
    bucketing = Bucketing(max_tokens=8)
    return len(list(BucketedIterableDataset([stream], bucketing=bucketing)))


# Conversations.

PROMPT = "{% if add_generation_prompt %}<|assistant|> {% endif %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
STRIPS = PLAIN.replace("m.content", "m.content if loop.last or m.role == 'user' else ''")
SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "text"}]
TWICE = [*SAID, *SAID]
UNWEIGHTED = [SAID[0], {**SAID[1], "weight": 0}, *SAID]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def chat_tokenizer(template: str | None = PLAIN) -> Any:
    from transformers import PreTrainedTokenizerFast  # seconds, for the rows of chats alone

    return PreTrainedTokenizerFast(tokenizer_object=words(), chat_template=template)


def encoded(said: Any = SAID, template: str | None = PLAIN, **options: Any) -> None:
    sample = ChatEncoder(chat_tokenizer(template), **options)(said)
    assert sample["loss_mask"].any()


def message_of(sender: str, text: str, *, is_sharegpt: bool) -> dict[str, str]:
    names = ("from", "value") if is_sharegpt else ("role", "content")
    return dict(zip(names, (sender, text), strict=True))


REJECTS = "{% if not messages[0].content %}{{ raise_exception('empty') }}{% endif %}" + PLAIN
CHATS = {
    "one role as a text": Remedy(
        lambda _: encoded(context_roles="documents"),
        r"write (\[.*\])$",
        lambda _, roles: encoded(context_roles=ast.literal_eval(roles)),
    ),
    "a tokenizer of another library": Remedy(
        lambda _: ChatEncoder(words()),
        r"apply_chat_template; .*\btransformers$",
        lambda _: encoded(),
    ),
    "a tokenizer without a template": Remedy(
        lambda _: encoded(template=None),
        r"set tokenizer\.(chat_template), pass (chat_template)=, or use ",
        lambda _, attribute, option: [
            setattr(tokenizer := chat_tokenizer(None), attribute, PLAIN),
            ChatEncoder(tokenizer)(SAID),
            encoded(template=None, **{option: PLAIN}),
            encoded(template=PLAIN),
        ],
    ),
    "a slow tokenizer": Remedy(
        lambda _: ChatEncoder(slow_tokenizer()),
        r"pass a fast tokenizer .*, or (train_on)='(\w+)'$",
        lambda _, option, value: [
            encoded(),
            ChatEncoder(slow_tokenizer(), **{option: value})(SAID),
        ],
    ),
    "a row without a conversation": Remedy(
        lambda _: encoded({"text": "a"}),
        r"'text' .*field (\w+) or (\w+), or pass the messages alone$",
        lambda _, *names: [encoded(SAID), *(encoded({name: SAID}) for name in names)],
    ),
    "a text as a conversation": Remedy(
        lambda _: encoded("a text"),
        r"messages such as (\{.*\})$",
        lambda _, message: encoded([ast.literal_eval(message), *SAID]),
    ),
    "tools that are other text": Remedy(
        lambda _: encoded({"messages": SAID, "tools": "add(a, b)"}),
        r"is not JSON; write the tools as a list, or as JSON text of one$",
        lambda _: [
            encoded({"messages": SAID, "tools": tools}) for tools in ([TOOL], json.dumps([TOOL]))
        ],
    ),
    "messages without an author": Remedy(
        lambda _: encoded([{"text": "a"}]),
        r"must have (\w+) and (\w+), or (\w+) and (\w+)$",
        lambda _, *names: [
            encoded([{names[0]: "user", names[1]: "a"}, *SAID]),
            encoded([{names[2]: "human", names[3]: "a"}, *SAID]),
        ],
    ),
    "an author that is not known": Remedy(
        lambda _: encoded([message_of("me", "a", is_sharegpt=True)]),
        r"'me'.*write it with (\w+) and (\w+)$",
        lambda _, role, content: encoded([{role: "user", content: "a"}, *SAID]),
    ),
    "a role that is not known": Remedy(
        lambda _: encoded([message_of("expert", "a", is_sharegpt=False), *SAID]),
        r"rename it to '(\w+)' .*pass (context_roles)=(\[.*?\])",
        lambda _, role, option, roles: [
            encoded([message_of(role, "a", is_sharegpt=False), *SAID]),
            encoded(
                [message_of("expert", "a", is_sharegpt=False), *SAID],
                **{option: ast.literal_eval(roles)},
            ),
        ],
    ),
    "a conversation that the template rejects": Remedy(
        lambda _: encoded([{"role": "user", "content": ""}, *SAID[1:]], REJECTS),
        r"(?:fix|mend) the conversation or leave it out$",
        lambda _: encoded(SAID, REJECTS),
    ),
    "marked text that is changed": Remedy(
        lambda _: encoded(SAID, "{% set x %}" + MARKED + "{% endset %}{{ x | upper }}"),
        r"\{% generation %\}.*put the markers around ",
        lambda _: encoded(SAID, MARKED),
    ),
    "markers that are elsewhere": Remedy(
        lambda _: encoded(SAID, MARKED.replace("'assistant'", "'tool'")),
        r"\{% generation %\} .*put them around ",
        lambda _: encoded(SAID, MARKED),
    ),
    "a message with a weight of its own": Remedy(
        lambda _: encoded(UNWEIGHTED),
        r"choose another (train_on)=, or leave '(\w+)' out and set the sample's loss_mask ",
        lambda _, option, key: [
            encoded(UNWEIGHTED, **{option: "last_response"}),
            encoded([{k: v for k, v in m.items() if k != key} for m in UNWEIGHTED]),
        ],
    ),
    "a null inside a message": Remedy(
        lambda _: encoded([{"role": "user", "content": {"city": "Rome", "x": None}}, *SAID[1:]]),
        r"store the arguments of calls as JSON text, or remove their nulls before encoding$",
        lambda _: [
            encoded([{"role": "user", "content": content}, *SAID[1:]])
            for content in ('{"city": "Rome", "x": null}', {"city": "Rome"})
        ],
    ),
    "a row with a system text of its own": Remedy(
        lambda _: encoded({"messages": SAID, "system": "be kind"}),
        r"make it the first of (\w+): \{'role': '(\w+)', .*\}, and leave out 'system'$",
        lambda _, name, role: encoded({name: [{"role": role, "content": "be kind"}, *SAID]}),
    ),
    "a template that changes earlier messages": Remedy(
        lambda _: encoded(TWICE, STRIPS),
        r"pass (chat_template)= with \{% generation %\} markers, or train_on='(\w+)'$",
        lambda _, option, last: [
            encoded(TWICE, STRIPS, **{option: MARKED}),
            encoded(TWICE, STRIPS, train_on=last),
        ],
    ),
    "a header without a prompt": Remedy(
        lambda _: encoded(SAID, PLAIN.removesuffix(PROMPT)),
        r"(chat_template)= with \{% generation %\} markers or a generation prompt$",
        lambda _, option: [
            encoded(SAID, PLAIN.removesuffix(PROMPT), **{option: MARKED}),
            encoded(SAID, PLAIN),
        ],
    ),
}


def slow_tokenizer() -> Any:
    """What a tokenizer in Python offers: a template, and ids without their places."""
    fast = chat_tokenizer()

    class Slow(SimpleNamespace):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return fast(*args, **options)

    return Slow(apply_chat_template=fast.apply_chat_template, chat_template=PLAIN, is_fast=False)


# Length files.


def shard_of(folder: Path) -> Path:
    """Return the shard of a stream that is made for this row."""
    return mds(folder, compression=None) / "shard.00000.mds"


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def counted(folder: Path, **options: Any) -> int:
    return sum(each.num_samples for each in write_lengths(mds(folder), **options))


def rewritten(folder: Path) -> int:
    out = write_stream(ROWS, folder / "again").path
    return sum(each.num_samples for each in write_lengths(out))


def large_ids(folder: Path) -> Path:
    """A stream with a column of numbers that are not ids, and one of ids."""
    out = folder / "large"
    if not out.exists():
        columns = {"tokens": "ndarray:int64", "ids": "ndarray:int32"}
        with streaming.MDSWriter(out=str(out), columns=columns) as writer:
            writer.write({"tokens": np.array([2**40]), "ids": np.array([1], np.int32)})
    return out


LENGTHS = {
    "a folder without a stream": Remedy(
        lambda folder: write_lengths(folder),
        r"give an MDS stream: ",
        lambda folder: write_lengths(mds(folder)),
    ),
    "a shard that is missing": Remedy(
        lambda folder: (shard_of(folder).rename(folder / "moved"), counted(folder)),
        r"shard\.00000\.mds: .*copy the shard ",
        lambda folder: ((folder / "moved").rename(shard_of(folder)), counted(folder)),
    ),
    "a shard that was cut short": Remedy(
        lambda folder: (os.truncate(shard_of(folder), 100), counted(folder)),
        r"has 100 bytes, .*write it (?:anew|again)$",
        rewritten,
    ),
    "a shard that was changed": Remedy(
        lambda folder: (flipped(shard_of(folder)), counted(folder)),
        r"copy or write it again$",
        lambda folder: [(flipped(shard_of(folder)), counted(folder)), rewritten(folder)],
    ),
    "numbers that are not ids": Remedy(
        lambda folder: write_lengths(large_ids(folder)),
        r"token id 1099511627776, .*name the column of the tokens$",
        lambda folder: write_lengths(large_ids(folder), tokens="ids"),
    ),
    "a copy to keep nowhere": Remedy(
        lambda folder: write_remote_lengths(str(mds(folder)), keep_local=True),
        r"keep_local=True, .*set (local)= to ",
        lambda folder, name: write_remote_lengths(
            str(mds(folder)), keep_local=True, **{name: folder / "kept"}
        ),
    ),
}


def stepped(steps: Any, **options: Any) -> None:
    assert list(online(steps=steps, **options))


def short(steps: Any, epoch_end: str) -> None:
    """Fewer packs than a batch has."""
    stepped(steps, batch_size=64, mixing=Mixing(epoch_end=epoch_end))


def in_torch(num_workers: int) -> None:
    assert list(DataLoader(online(steps=2).dataset, batch_size=None, num_workers=num_workers))


STEPS = {
    "ranks without a process group": Remedy(
        lambda _: stepped("equal", world=World(num_ranks=2)),
        r"init_process_group .*set steps to a number, such as steps=(\d+)$",
        lambda _, steps: stepped(int(steps), world=World(num_ranks=2)),
    ),
    "sources that never end": Remedy(
        lambda _: stepped("equal", mixing=Mixing(stop="repeat")),
        r"stop='(\w+)' they never do; .* such as steps=(\d+)$",
        lambda _, stop, steps: stepped(int(steps), mixing=Mixing(stop=stop)),
    ),
    "the same stream on all ranks": Remedy(
        lambda _: stepped(2, mixing=Mixing(batching_method="per_stream")),
        r"set Mixing\(stop='(\w+)'\) and steps to a number, or batching_method='(\w+)'$",
        lambda _, stop, method: [
            stepped(2, mixing=Mixing(batching_method="per_stream", stop=stop)),
            stepped(2, mixing=Mixing(batching_method=method)),
        ],
    ),
    "a number that is none": Remedy(
        lambda _: stepped(0),
        r"such as (\d+), or '(\w+)'$",
        lambda _, number, word: [stepped(int(number)), stepped(word)],
    ),
    "an epoch without a batch": Remedy(
        lambda _: short(2, "drop"),
        r"steps=2: .*set Mixing\(epoch_end='(\w+)'\)$",
        lambda _, end: short(2, end),
    ),
    "a loop without a step": Remedy(
        lambda _: short("equal", "drop"),
        r"no step, .*set Mixing\(epoch_end='(\w+)'\)$",
        lambda _, end: short("equal", end),
    ),
    "a state of a number": Remedy(
        lambda _: resume_online(saved_online(steps=5), steps="equal"),
        r"saved with steps=(\d+), .*resume with a number of steps$",
        lambda _, steps: resume_online(saved_online(steps=5), steps=int(steps) + 1),
    ),
    "a state of equal steps": Remedy(
        lambda _: resume_online(saved_online(steps="equal"), steps=5),
        r"resume with steps='(\w+)'$",
        lambda _, steps: resume_online(saved_online(steps="equal"), steps=steps),
    ),
    "torch's workers": Remedy(
        lambda _: in_torch(1),
        r"iterate with (PackedDataLoader), or set num_workers=(\d)",
        lambda _, loader, workers: [
            list(getattr(streampack, loader)(online(steps=2).dataset)),
            in_torch(int(workers)),
        ],
    ),
}

GROUPS = {
    "states": STATES,
    "epochs": EPOCHS,
    "loaders": LOADERS,
    "resumed": RESUMED,
    "iterables": ITERABLES,
    "steps": STEPS,
    "chats": CHATS,
    "lengths": LENGTHS,
}
TABLE = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("remedy", TABLE.values(), ids=TABLE)
def test_what_a_message_of_a_run_says_to_do_works(remedy: Remedy, tmp_path: Path):
    remedy.check(tmp_path)


def test_every_remedy_of_the_complete_modules_of_runs_is_in_the_table(tmp_path: Path):
    assert untried(COMPLETE, TABLE.values(), tmp_path) == [], "add a row that applies the remedy"
