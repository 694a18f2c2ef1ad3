"""`PackedDataLoader`'s side of the buffered way: workers that pack, and the state of all of them.

::

    worker 0   batch 0, its state    batch 2, its state ...
    worker 1   batch 1, its state    batch 3, its state ...
    here       batch 0, 1, 2, 3 ...                state = the latest state of each worker

A worker's state travels with its batch, so what was read ahead is not part of it. After a resume
torch begins with worker 0 again; workers whose turn it is not hand over a blank first.

Cost: that of the hand-over, and a state of some KB a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from streampack.assemble import Batch
from streampack.errors import ConfigError, ResumeError
from streampack.load.buffers import batches_ahead
from streampack.load.ending import ended_at_exit
from streampack.load.handover import Folded, fold
from streampack.load.iterable import FlowDataset
from streampack.load.iterable_state import KIND, check_state
from streampack.load.iterations import Iterations, WorkersLoader
from streampack.load.tally import shares
from streampack.load.workers import WorkerOptions, pin
from streampack.read.prefetch import work_ahead
from streampack.types import State

__all__ = ["IterableLoading"]


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """A worker's state on its way; torch would look for tensors in a plain dict."""

    state: State


Delivered = tuple[int, Batch | Folded, _Told]  # worker, batch, the worker's state after it


class _WithStates(IterableDataset[Delivered | None]):
    """What workers iterate: batches, each with the worker's state after it."""

    def __init__(self, dataset: FlowDataset, start: State | None, ahead: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._start = start
        self._ahead = ahead

    def forget_start(self) -> None:
        """Begin an epoch in workers that are made from now on."""
        self._start = None

    def __iter__(self) -> Iterator[Delivered | None]:
        info = get_worker_info()
        worker = info.id if info else 0
        start, self._start = self._start, None
        if start is not None:
            self._dataset.load_state_dict(start["workers"][worker])
        batches = self._dataset.native_batches(self._ahead)
        if start is not None and worker < start["next_worker"]:
            yield None  # its turn comes after the others'
        for batch in batches:
            yield worker, fold(batch) if info else batch, _Told(self._dataset.state_here())
            del batch  # not while the next is made


def _same(item: Delivered | None) -> Delivered | None:
    return item


class IterableLoading:
    """Iterates a dataset of the buffered way with or without workers; see `PackedDataLoader`.

    Args:
        dataset: What to iterate.
        options: How it is read.

    Raises:
        ConfigError: If `dataset.buffers` cannot hold one batch a worker.
    """

    def __init__(self, dataset: FlowDataset, options: WorkerOptions) -> None:
        num_workers = options.num_workers
        self._dataset = dataset
        self._num_workers = num_workers
        self._ahead = batches_ahead(
            dataset.buffers, dataset.footprint(num_workers), options.prefetch_factor
        )
        self._options = replace(options, prefetch_factor=self._ahead)
        self._pins = options.pin_memory and torch.cuda.is_available()
        self._source = _WithStates(dataset, None, self._ahead)  # what the workers were given
        self._workers: Iterations | None = None
        self._start: State | None = None
        # Of the batch last delivered, or of a state; None: whichever begins next.
        self._epoch: int | None = None
        self._num_begun = 0
        self._next_worker = 0
        # The latest state of each worker; None: nothing of this epoch yet.
        self._states: list[State | None] = [None] * max(num_workers, 1)
        # What stats are of: as above, and kept until the next epoch begins.
        self._flows: list[State | None] = [None] * max(num_workers, 1)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has workers of its own.
        return self.__dict__ | {"_workers": None}

    def _state_of(self, worker: int) -> State:
        state = self._states[worker]
        if state is not None:
            return state
        place = self._dataset.place(worker, max(self._num_workers, 1))
        if self._epoch is None:
            return self._dataset.next_state(place)
        return self._dataset.state_at_start(self._epoch, place)

    def __len__(self) -> int:
        raise TypeError(
            f"a {type(self._dataset).__name__} has no len(): its samples are not known ahead"
        )

    def state_dict(self) -> State:
        """Return where this rank stands after the batch last delivered, as JSON."""
        workers = [copy.deepcopy(self._state_of(worker)) for worker in range(len(self._states))]
        return {
            "version": workers[0]["version"],
            "kind": KIND,
            "num_workers": self._num_workers,
            "next_worker": self._next_worker,
            "workers": workers,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next iteration.

        Raises:
            ResumeError: If it is of another number of workers, rank, world or dataset.
        """
        if not isinstance(state, dict) or state.get("kind") != KIND or "workers" not in state:
            raise ResumeError(
                "the state is not of a PackedDataLoader over a PackedIterableDataset or "
                "BucketedIterableDataset; load what "
                "its state_dict() returned, unchanged"
            )
        saved = state.get("num_workers")
        if saved != self._num_workers:
            raise ResumeError(
                f"the state was saved with num_workers={saved}, but this loader has num_workers="
                f"{self._num_workers}; samples in buffers belong to their worker, so resume with "
                f"num_workers={saved}"
            )
        self._check_layout(state)
        for worker, each in enumerate(state["workers"]):
            place = self._dataset.place(worker, len(self._states))
            check_state(each, self._dataset.fingerprint, place)
        self._num_begun += 1  # an iteration under way no longer tells where the run stands
        self._start = state
        self._epoch = max(int(each["epoch"]) for each in state["workers"])
        self._next_worker = state["next_worker"]
        self._states = list(copy.deepcopy(state["workers"]))
        self._flows = [each["flow"] for each in state["workers"]]
        self._workers = None  # running workers would not hear of it

    def _check_layout(self, state: State) -> None:
        """Refuse what has not a state for each worker, as a damaged file may give."""
        num, workers, next_worker = len(self._states), state["workers"], state.get("next_worker")
        wrong = None
        if not isinstance(workers, list) or len(workers) != num:
            saved = len(workers) if isinstance(workers, list) else "no"
            wrong = f"the state holds {saved} workers', but this loader has {num}"
        elif type(next_worker) is not int or not 0 <= next_worker < num:
            wrong = (
                f"the state's next_worker is {next_worker!r:.80}, not a worker from 0 to {num - 1}"
            )
        if wrong:
            raise ResumeError(f"{wrong}; load what state_dict() returned, unchanged")

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on from the state that was loaded, at the first batch."""
        if self._start is None:
            self._epoch, self._next_worker = None, 0
            self._states = [None] * len(self._states)
            self._flows = [None] * len(self._states)
        self._num_begun += 1
        return ended_at_exit(self._deliver(self._num_begun))

    def _deliver(self, number: int) -> Generator[Any, None, None]:
        self._check_turn(number)
        # Here and not in iter(), which trainers call to see whether they can, and forget.
        start, self._start = self._start, None
        num_batches = 0
        for item in self._items(start):
            if item is None:
                continue
            worker, content, told = item
            batch = content.unfold() if isinstance(content, Folded) else content
            del item, content
            self._states[worker] = told.state
            self._flows[worker] = told.state["flow"]
            self._epoch = int(batch["epoch"])
            self._next_worker = (worker + 1) % len(self._states)
            num_batches += 1
            batch = self._dataset.convert(batch, self._ahead)
            yield batch
            del batch  # not while the next is made
            self._check_turn(number)
        # Without workers the dataset itself goes on with the next epoch where nothing was left.
        is_over = start is not None and not num_batches and self._num_workers
        self._epoch, self._next_worker = None, 0
        self._states = [None] * len(self._states)
        if is_over:
            # The state was taken after the epoch's last batch: what follows is the next epoch.
            yield from self._deliver(number)

    def _check_turn(self, number: int) -> None:
        # Workers, sources and the state that is saved are those of one iteration.
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, or a state was loaded, and iterables "
                "are gone through by one at a time; end one before the next, or make a dataset and "
                "a loader for each"
            )

    def _items(self, start: State | None) -> Iterator[Delivered | None]:
        if not self._num_workers:
            source = _WithStates(self._dataset, start, self._ahead)
            is_ahead = self._ahead > 1 and self._options.prefetch_threads
            items = work_ahead(source, _same, self._ahead) if is_ahead else iter(source)
            return map(pin, items) if self._pins else items
        if self._workers is None or start is not None:
            if start is not None:
                self._dataset.set_epoch(max(int(each["epoch"]) for each in start["workers"]))
            self._source = _WithStates(self._dataset, start, self._ahead)
            loader = WorkersLoader(self._source, batch_size=None, **self._options.for_torch())
            self._workers = Iterations(loader)
        try:
            return self._workers.begin()
        finally:
            # Each worker forgot it in its own copy; a later iteration may make new ones.
            self._source.forget_start()

    def stats(self) -> dict[str, Any]:
        """Return what this rank delivered of the epoch under way, or of the last one."""
        return _stats(self._dataset, [flow for flow in self._flows if flow], self._ahead)


def _stats(dataset: FlowDataset, flows: list[State], ahead: int) -> dict[str, Any]:
    """Sum up what the workers' states say."""
    names, plan = dataset.stream_names, dataset.plan
    # Of each stream: samples, tokens, split, truncated, dropped; see PackFlow.
    counts = [
        [sum(flow["counts"][number][column] for flow in flows) for column in range(5)]
        for number in range(len(names))
    ]
    samples, tokens = [row[0] for row in counts], [row[1] for row in counts]
    targets = shares([amount or 0 for amount in plan.amounts.amounts])
    packs = sum(flow["num_packs"] for flow in flows)
    slots = sum(flow["num_slots"] for flow in flows)
    one_batch = dataset.footprint(0).batch_tokens
    batch_tokens = ahead * one_batch
    held = [flow["high_water_tokens"] for flow in flows] or [0]
    held_bytes = [flow["high_water_bytes"] for flow in flows] or [0]
    return {
        "streams": {
            name: {
                "samples": row[0],
                "tokens": row[1],
                "split": row[2],
                "truncated": row[3],
                "dropped": row[4],
                "skipped": sum(flow["sources"][number]["bad"] for flow in flows),
                "share_samples": share_samples,
                "share_tokens": share_tokens,
                "target": target,
            }
            for number, (name, row, share_samples, share_tokens, target) in enumerate(
                zip(names, counts, shares(samples), shares(tokens), targets, strict=True)
            )
        },
        "packs": packs,
        "tokens": sum(tokens),
        "fill": sum(tokens) / slots if slots else 0.0,
        "substituted": sum(flow["substituted"] for flow in flows),
        "buffers": {
            # What is held includes the batch that is put together, which is one of those ahead.
            "worker_tokens": max(held) + batch_tokens - one_batch,
            "worker_bytes": max(held_bytes) + dataset.footprint(0).format_bytes,
            "rank_tokens": sum(held) + (batch_tokens - one_batch) * max(len(flows), 1),
        },
    }
