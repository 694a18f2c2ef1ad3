"""`PackedDataLoader` over online datasets: the workers that pack, and their combined state.

::

    worker 0   batch 0, its state    batch 2, its state ...
    worker 1   batch 1, its state    batch 3, its state ...
    here       batch 0, 1, 2, 3 ...                state = the latest state of each worker

A worker's state travels with its batch, so prefetched batches are not part of the loader's state.
After a resume, the worker whose batch is next delivers first.

Cost: the batch transfer, and a state of a few KB per batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
from torch.utils.data import get_worker_info

from streampack.batch.batch import Batch
from streampack.errors import ConfigError, ResumeError
from streampack.online.dataset import FlowDataset
from streampack.online.state import KIND, check_state
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.memory_budget import max_prefetch
from streampack.runtime.reading_workers import pin
from streampack.runtime.stats import shares
from streampack.runtime.worker_pool import Pool, WorkerOptions
from streampack.types import State


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """A worker's state in transit, wrapped so that torch does not search it for tensors."""

    state: State


@dataclass(frozen=True, slots=True, eq=False)
class _At:
    """A position of the run: the state of each worker, and the worker of the next batch."""

    states: list[State]
    next_worker: int = 0

    def after(self, worker: int, state: State) -> _At:
        """Return the position after a batch of one worker."""
        states = [*self.states[:worker], state, *self.states[worker + 1 :]]
        return _At(states, (worker + 1) % len(states))


Delivered = tuple[int, Batch, _Told]  # worker, batch, the worker's state after it


class _WithStates:
    """The work of a `Pool` worker: batches, each with the worker's state after it."""

    def __init__(self, dataset: FlowDataset, ahead: int) -> None:
        self._dataset = dataset
        self._ahead = ahead

    def __call__(self, start: State | None) -> Callable[[Any], list[Delivered]]:
        """Begin an iteration in a worker."""
        return partial(_next_of, self._items(start))

    def _items(self, start: State | None) -> Iterator[Delivered]:
        info, dataset = get_worker_info(), self._dataset
        worker = info.id if info else 0
        if start is not None:
            dataset.load_state_dict(start["workers"][worker])
        begun = dataset.begin()
        try:
            for batch, state in dataset.batches(begun, self._ahead):
                dataset.note(begun, state)
                yield worker, batch, _Told(state)
                del batch  # free it before the next one is made
        except GeneratorExit:
            raise
        except BaseException:
            dataset.abandon()
            raise


def _next_of(items: Iterator[Delivered], _: Any) -> list[Delivered]:
    return list(islice(items, 1))


class IterableLoading:
    """Iterates an online dataset with or without workers; see `PackedDataLoader`.

    Args:
        dataset: The dataset.
        options: The worker options.

    Raises:
        ConfigError: If `dataset.buffers` cannot hold one batch per worker.
    """

    def __init__(self, dataset: FlowDataset, options: WorkerOptions) -> None:
        num_workers = options.num_workers
        self._dataset = dataset
        self._num_workers = num_workers
        self._ahead = max_prefetch(
            dataset.buffers, dataset.footprint(num_workers), options.prefetch_factor
        )
        self._options = replace(options, prefetch_factor=self._ahead)
        self._pins = options.pin_memory and torch.cuda.is_available()
        self._source = _WithStates(dataset, self._ahead)
        self._workers: Pool | None = None
        self._num_begun = 0
        num = max(num_workers, 1)
        # With workers: the state of the next iteration's start, and the position once past it.
        self._start: State | None = None
        self._at: _At | None = None
        self._num_moves = dataset.num_moves  # as of these two
        # The latest state of each worker, for the stats; kept until the next epoch's first batch.
        self._flows: list[State | None] = [None] * num

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts its own workers.
        return self.__dict__ | {"_workers": None}

    def __len__(self) -> int:
        raise TypeError(
            f"a {type(self._dataset).__name__} has no len(): its samples are not known ahead"
        )

    def state_dict(self) -> State:
        """Return this rank's state after the last delivered batch, as JSON."""
        if not self._num_workers:
            return self._state(_At([self._dataset.state_here()]))
        self._follow()
        return self._state(self._at or self._next())

    def _state(self, at: _At) -> State:
        workers = copy.deepcopy(at.states)
        return {
            "version": workers[0]["version"],
            "kind": KIND,
            "num_workers": self._num_workers,
            "next_worker": at.next_worker,
            "workers": workers,
        }

    def _next(self) -> _At:
        """Return the position at which the workers' next iteration begins."""
        if self._start is not None:
            return _At(self._start["workers"], self._start["next_worker"])
        places = (self._dataset.place(n, self._num_workers) for n in range(self._num_workers))
        return _At([self._dataset.next_state(place) for place in places])

    def _follow(self) -> None:
        """Drop the position if the dataset was given a state or an epoch since."""
        if self._num_moves != self._dataset.num_moves:
            self._num_moves = self._dataset.num_moves
            self._start = self._at = None
            self._end_workers()  # running workers would not see the change

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next iteration.

        Raises:
            ResumeError: If it belongs to another number of workers, rank, world or dataset.
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
        dataset = self._dataset
        for worker, each in enumerate(state["workers"]):
            check_state(each, dataset.fingerprint, dataset.place(worker, len(self._flows)))
        self._num_begun += 1  # a running iteration no longer sets the position
        self._flows = [each["flow"] for each in state["workers"]]
        if not self._num_workers:
            dataset.load_state_dict(state["workers"][0])
            return
        dataset.set_epoch(max(int(each["epoch"]) for each in state["workers"]))
        self._follow()
        self._start = copy.deepcopy(state)
        if any(each["flow"] for each in state["workers"]):
            dataset.note_elsewhere()

    def _check_layout(self, state: State) -> None:
        """Check for one state per worker: the state may come from a damaged file."""
        num, workers, next_worker = len(self._flows), state["workers"], state.get("next_worker")
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
        """Iterate over the next epoch, or resume from the loaded state."""
        self._num_begun += 1
        self._follow()
        if self._at is not None:
            self._start = None  # a batch was delivered since
        self._at = None
        if not self._num_workers:
            self._dataset.ask()
        return close_at_exit(self._deliver(self._num_begun))

    def _deliver(self, number: int) -> Generator[Any, None, None]:
        # Not in iter(): some trainers call it only to test for support, and drop the result.
        self._check_turn(number)
        for batch in self._from_workers() if self._num_workers else self._from_here():
            yield batch
            del batch  # free it before the next one is made
            self._check_turn(number)

    def _from_here(self) -> Generator[Any, None, None]:
        dataset = self._dataset
        begun = dataset.begin()
        try:
            is_ahead = self._ahead > 1 and self._options.prefetch_threads
            read = dataset.read_ahead if is_ahead else dataset.batches
            for native, state in read(begun, self._ahead):
                batch = dataset.convert(pin(native) if self._pins else native, self._ahead)
                del native
                self._flows = [state["flow"]]
                dataset.note(begun, state)
                yield batch
                del batch  # free it before the next one is made
            dataset.note(begun, None)
        except GeneratorExit:
            raise
        except BaseException:
            dataset.abandon()
            raise

    def _from_workers(self) -> Generator[Any, None, None]:
        dataset, start, at = self._dataset, self._start, self._next()
        before, num_batches = _At(at.states, at.next_worker), 0
        try:
            for worker, native, told in self._items(start):
                batch = native
                del native
                batch = dataset.convert(pin(batch) if self._pins else batch, self._ahead)
                at = at.after(worker, told.state)
                self._flows = [state["flow"] for state in at.states]
                if not num_batches:
                    dataset.note_elsewhere()
                    self._num_moves = dataset.num_moves
                num_batches += 1
                # Set last: an interrupt comes before this, or after the caller has the batch.
                if self._num_moves == dataset.num_moves:
                    self._at = at
                yield batch
                del batch  # free it before the next one is made
        except GeneratorExit:
            raise
        except BaseException:
            if not num_batches or (self._at is None and self._num_moves == dataset.num_moves):
                self._undo(before)
            raise
        if self._num_moves == dataset.num_moves:
            dataset.set_epoch(1 + max(int(state["epoch"]) for state in at.states))
            self._num_moves = dataset.num_moves
            self._start = self._at = None
        if start is not None and not num_batches:
            # The state was taken after the epoch's last batch, so continue with the next epoch.
            yield from self._from_workers()

    def _undo(self, before: _At) -> None:
        """Restore the position from before a failed start."""
        flows = self._flows
        with suppress(ResumeError):  # the start may have failed on this very state
            self.load_state_dict(self._state(before))
        self._flows = flows
        self._end_workers()

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.end()

    def _check_turn(self, number: int) -> None:
        # The workers, the sources and the saved state belong to one iteration only.
        if number != self._num_begun:
            raise ConfigError(
                "a later iteration of this loader has begun, or a state was loaded, and iterables "
                "are gone through by one at a time; end one before the next, or make a dataset and "
                "a loader for each"
            )

    def _items(self, start: State | None) -> Iterator[Delivered]:
        if self._workers is None:
            self._workers = Pool(self._source, self._options)
        first = 0
        if start is not None:
            self._workers.end()  # running workers must no longer write to the epoch counter
            first = start["next_worker"]
        return self._workers.results(repeat(None), first=first, given=start)

    def stats(self) -> dict[str, Any]:
        """Return this rank's delivery statistics of the current epoch, or of the last one."""
        return _stats(self._dataset, [flow for flow in self._flows if flow], self._ahead)


def _stats(dataset: FlowDataset, flows: list[State], ahead: int) -> dict[str, Any]:
    """Add up the statistics in the workers' states."""
    names, plan = dataset.stream_names, dataset.plan
    # Per stream: samples, tokens, split, truncated, dropped; see OnlinePacker.
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
        "digest": dataset.digest,
        "buffers": {
            # The high water already includes the batch under construction, one of those ahead.
            "worker_tokens": max(held) + batch_tokens - one_batch,
            "worker_bytes": max(held_bytes) + dataset.footprint(0).format_bytes,
            "rank_tokens": sum(held) + (batch_tokens - one_batch) * max(len(flows), 1),
        },
    }
