"""The engine of the online datasets: iterations of one worker, their batches, and states.

::

    begin --> OnlineIteration --> OnlinePacker --> native batch, state --convert--> batch

Each worker of each rank has a copy. It reads its own slice of each source.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from streampack._threads import ordered_thread_map, prefetched
from streampack.batch.batch import Batch
from streampack.batch.formats.registry import Formatter
from streampack.batch.kernels import ROW
from streampack.batch.slices import slice_batch
from streampack.config import Buffers
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.gather.context_slice import ContextSlice
from streampack.online.byte_budget import (
    HeldMemory,
    added_bytes,
    batch_bytes,
    footprint_of,
    format_bytes,
    window_tokens,
)
from streampack.online.item_decoder import limit_tokenizer_threads
from streampack.online.packing_loop import OnlinePacker
from streampack.online.plan import FlowPlan
from streampack.online.source_slice import SourceSlice, WorkerSlice, most_empty_passes
from streampack.online.source_view import source_view
from streampack.online.state import (
    LoopPosition,
    Position,
    Standing,
    check_slice,
    check_state,
    flow_fingerprint,
    read_loop,
    saved_state,
    worker_state,
)
from streampack.runtime.memory_budget import LESS_AHEAD, MemoryFootprint, max_prefetch
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import RankView
from streampack.runtime.resumable import ResumableRun
from streampack.runtime.torch_worker import TorchWorker, worker_here
from streampack.runtime.whole_batch import whole
from streampack.texts.source_traits import has_index
from streampack.types import Int64Array, Packs, State
from streampack.world import World

# Fingerprint fields that all ranks must share. Amounts and batch sizes may differ.
SAME_ON_ALL_RANKS = ("seed", "shuffle_block_size", "max_seq_len", "method", "batching_method")


Delivery: TypeAlias = tuple[int, Batch, State]
"""A worker, its native batch, and what has changed in its state since the batch before."""


class SourceLock:
    """Lets one iteration at a time read the sources; each copy and each process has its own."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> Any:
        return SourceLock, ()

    @contextmanager
    def take(self, check: Callable[[], None]) -> Iterator[None]:
        """Wait until no other iteration reads; `check` then says whether this one still may."""
        if self._pid != os.getpid():  # a fork copies the lock as it is
            self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            check()
            yield


class OnlineEngine(ResumableRun[Position, Position]):
    """Iterates over a process's slice of the sources, and resumes from its states.

    An iteration is identified by the position where it began.

    `context` is the slice of each row that this rank gets, or None for whole rows.
    """

    state: Standing

    def __init__(
        self,
        plan: FlowPlan,
        buffers: Buffers,
        world: World,
        convert: Formatter,
        context: ContextSlice | None,
        *,
        finds_world: bool,
    ) -> None:
        super().__init__(world, finds_world=finds_world)
        self.plan = plan
        self.buffers = buffers
        kind = "Packed" if plan.bucketing is None else "Bucketed"
        self.kind = f"{kind}IterableDataset"
        self._fingerprint = flow_fingerprint(plan)
        self._convert = convert
        self._context = context
        self._format_bytes = format_bytes(convert, plan)
        self._slices: list[SourceSlice] = []
        self._reading: Any = None  # what a prefetch thread reads
        self._access = SourceLock()
        self.state = Standing()
        self._is_start_own = False  # loaded in this worker, not inherited from the main process
        self.most_empty_epochs = max(
            most_empty_passes(each.source, is_sharded=bool(each.sharded)) for each in plan.streams
        )
        """Epochs without a batch, one after the other, that end a loop of a number of steps."""
        max_prefetch(buffers, self.footprint(0), 1)

    def __getstate__(self) -> dict[str, Any]:
        # Iterators stay in the process that created them.
        return super().__getstate__() | {"_slices": [], "_reading": None}

    @property
    def size(self) -> str:
        return self.plan.size

    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint

    def rank_view(self) -> RankView:
        recipe = {key: self._fingerprint[key] for key in SAME_ON_ALL_RANKS}
        recipe["context_parallel"] = [self.world.context_parallel, self.world.context_layout]
        recipe["steps"] = self.plan.steps
        own = [number for number, stream in enumerate(self.plan.streams) if not stream.sharded]
        sources = {"number of streams": len(own)}
        for number in own:
            where = f"stream {self.plan.names[number]!r} (streams[{number}])"
            sources |= source_view(self.plan.streams[number], where)
        return {"streams": [], "sources": sources, "recipe": recipe}

    def footprint(self, num_workers: int) -> MemoryFootprint:
        footprint = footprint_of(self.plan, num_workers, self._format_bytes or 0)
        window = sum(window_tokens(self.plan, self.buffers, num_workers))
        return replace(footprint, packer_tokens=footprint.packer_tokens + window)

    def pack_window(self, num_workers: int) -> int:
        """Return the packs that each of `num_workers` workers shuffles together; 0: no shuffle."""
        window = sum(window_tokens(self.plan, self.buffers, num_workers))
        return min(self.plan.pack_shuffle, window // self.plan.packing.row_tokens)

    def convert(self, batch: Batch, ahead: int = 1) -> Any:
        """Convert a native batch to the requested format; `ahead` batches are resident together.

        Refuse tensors that a user's function adds if they do not fit `Buffers.worker_bytes`.
        """
        converted, limit = self._convert(batch), self.buffers.worker_bytes
        if self._format_bytes is None and limit is not None:
            added = added_bytes(converted, batch)
            needed = added + ahead * batch_bytes(self.plan)
            if needed > limit:
                raise ConfigError(
                    f"Buffers(worker_bytes={limit}) cannot hold {ahead} native batches and the "
                    f"{added} bytes that batch_format adds to one; set worker_bytes to at least "
                    f"{needed}, or {LESS_AHEAD}"
                )
        return converted

    def provenance(self, native: Batch) -> Provenance:
        """Return the provenance of a native batch, whose step is known once it is delivered."""
        rows = native["segments"].numpy().copy()  # a view of a buffer that is used again
        num_rows, row_tokens = native["tokens"].shape
        return Provenance(
            epoch=native["epoch"],
            position=native["position"],
            stream_names=self.plan.names,
            packs_of=partial(_packs_of, rows),
            shape=(num_rows, row_tokens * self.world.context_parallel),
            packing=self.plan.packing,
            context=self._context,
            convert=self._convert,
        )

    def _slices_of(self, num_workers: int = 1) -> list[WorkerSlice]:
        """Return the slice of this worker, or in the main process those of as many workers."""
        here, world = worker_here(), self.world
        return [
            WorkerSlice(
                device=world.place,
                num_devices=world.num_devices,
                worker=number,
                num_workers=here.num_workers or num_workers,
            )
            for number in ([here.number] if here.num_workers else range(num_workers))
        ]

    # Iteration.

    def batches(self) -> Iterator[Any]:
        """Return the batches of a torch worker's share of the next epoch."""
        if self.plan.steps is not None:  # torch's workers know nothing of each other
            raise ConfigError(
                f"steps={self.plan.steps!r} is counted in the process of the training loop, "
                "not in torch's workers; iterate with PackedDataLoader, or set num_workers=0"
            )
        # A worker begins immediately: its state may be requested before its first batch.
        return self._batches(self.begin())

    def _batches(self, begun: Position) -> Generator[Any, None, None]:
        with self.iteration(begun) as start:
            # Not noted at the end: the epoch may still run in other workers.
            position = self.whole_position(start)
            for _, native, change in self.deliveries(start, position.states[0]):
                batch = whole(self.convert(native))
                del native
                position = position.after(0, change)
                self.note(start, position)
                yield batch
                del batch  # free it before the next one is made

    def _begin(self, worker: TorchWorker, key: str) -> Standing:
        max_prefetch(self.buffers, self.footprint(worker.num_workers), 1)
        if self._reading is not None:
            self._reading.close()  # its thread would continue to read from the same sources
            self._reading = None
        for source in self._slices:
            source.is_left = True  # for a thread that outlives the close, waiting for an item
        start = self._unused_start
        epoch = self.counter.begin(worker.number, key, None if start is None else start.epoch)
        at = start or Position(epoch)
        return self.state._replace(start=None, at=at, current=at)

    def abandon(self) -> None:
        # Sources that a failed start has read are not where an earlier iteration was.
        failed = self.state
        super().abandon()
        self.state = self.state._replace(current=failed.current, last=failed.last, loop=failed.loop)

    def note(
        self, iteration: Position, position: Position | None, loop: LoopPosition | None = None
    ) -> None:
        """Record the position of an iteration after a batch, or None at its end, and of a loop."""
        self._before, state = None, self.state
        at = position if iteration is state.current else state.at
        last, loop = position or state.last, loop or state.loop
        self.state = state._replace(at=at, last=last, loop=loop)

    @property
    def mark(self) -> tuple[int, int]:
        """Changes with every start of an iteration, and wherever the position is set."""
        return self.state.moves, self._num_iterations

    @property
    def _unused_start(self) -> Position | None:
        # Each new worker, in every epoch, inherits a copy of the main process's loaded position.
        is_used = not self._is_start_own and self.counter.has_begun
        return None if is_used else self.state.start

    def check_drops(self, epoch: int) -> None:
        """Refuse an epoch of this rank without a batch, where `epoch_end` drops short ones."""
        if self.plan.mixing.epoch_end == "drop" and self.plan.steps is None:
            raise DataError(
                f"epoch {epoch} has no batch on rank {self.world.rank}: no worker filled one of "
                f"{self.plan.size}, and epoch_end='drop' drops smaller ones; set "
                "Mixing(epoch_end='pad'), make batches smaller, or use fewer workers"
            )

    def read_ahead(self, batches: Iterator[Delivery], ahead: int) -> Iterator[Delivery]:
        """Yield `deliveries` from a prefetch thread, until a later iteration begins."""
        # The batch that the loop has counts towards `ahead`, and so does the one at hand.
        if all(has_index(stream.source) for stream in self.plan.streams):
            reading = prefetched(batches, ahead - 1)
        else:
            # One thread reads: a generator may hold what only the thread that made it can use, such
            # as a connection to SQLite.
            reading = ordered_thread_map(batches, lambda batch: batch, ahead - 1, at_hand=1)
        self._reading = reading
        yield from reading

    def deliveries(
        self, start: Position, state: State, ahead: int = 1
    ) -> Generator[Delivery, None, None]:
        """Yield the rest of this process's share of an epoch, after a state of its own."""
        if worker_here():
            limit_tokenizer_threads(self.plan.streams)
        [worker_slice], epoch = self._slices_of(), start.epoch
        check = partial(self.check_current, start)
        with self._access.take(check):
            flow = self._packer(epoch, worker_slice, ahead)
            if state["flow"] is None:
                flow.begin()
            else:
                flow.load_state_dict(state)
        while True:
            with self._access.take(check):
                batch = flow.next_batch()
                if batch is None:
                    return
                change = flow.state_dict()
            if self._context is not None:
                batch = slice_batch(batch, self._context)
            yield worker_slice.worker, batch, change
            del batch, change  # free it before the next one is made

    def check_current(self, iteration: Position) -> None:
        """Refuse to continue an iteration after a later one has begun."""
        if self.state.current is not iteration:
            raise ConfigError(
                "a later iteration of this dataset has begun, and iterables serve only one "
                "at a time; end one before the next, or make a dataset for each"
            )

    def _packer(self, epoch: int, worker_slice: WorkerSlice, ahead: int) -> OnlinePacker:
        if not self._slices or self._slices[0].worker_slice != worker_slice:
            self._slices = self.plan.slices(worker_slice)
        for source in self._slices:
            source.check_not_used_up(epoch)
            source.is_left = False
        fixed = (self._format_bytes or 0) + ahead * batch_bytes(self.plan)
        held = HeldMemory(self.buffers.worker_bytes, fixed, ahead)
        tokens = window_tokens(self.plan, self.buffers, worker_slice.num_workers)
        return OnlinePacker(self.plan, self._slices, epoch, held, tokens)

    # State.

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch; without effect if it is the next one anyway."""
        state = self.state._replace(loop=LoopPosition(epoch, 0))
        if self.plan.steps is not None and self.state.loop.next == (epoch, 0, False):
            self.state = state
        else:
            self._resume_from(Position(epoch), state._replace(moves=state.moves + 1))

    def _resume_from(self, position: Position, state: Standing) -> None:
        self._is_start_own = bool(worker_here())
        self.go_to(state._replace(start=position), position.epoch)

    def _fingerprint_at(self, worker_slice: WorkerSlice) -> dict[str, Any]:
        """Return the fingerprint with the window that the buffers allow a worker."""
        if not self.plan.pack_shuffle:
            return self._fingerprint
        return self._fingerprint | {"pack_shuffle": self.pack_window(worker_slice.num_workers)}

    def whole_position(self, position: Position, num_workers: int = 0) -> Position:
        """Return a position with the states of as many workers, or 0: of this process.

        A ResumeError refuses those of others: only the workers that had them can continue.
        """
        slices = self._slices_of(max(num_workers, 1))
        for state, own in zip(position.states, slices, strict=False):
            check_slice(state, own)
        states = position.states or [
            worker_state(self._fingerprint_at(own), own, position.epoch) for own in slices
        ]
        return replace(position, states=states)

    @property
    def position(self) -> Position:
        """The position of the current iteration, or where the next one begins."""
        return self.state.at or self._unused_start or Position(self.counter.next_epoch)

    def state_dict(self) -> State:
        if self.is_elsewhere or len(self.position.states) > 1:
            raise ResumeError(
                "batches were delivered by a loader's workers, so the dataset cannot know how far "
                "they are; use PackedDataLoader or torchdata's StatefulDataLoader, and the "
                "loader's state_dict()"
            )
        [state] = self.whole_position(self.position).states
        return saved_state(state | ({} if worker_here() else self.loop_state()))

    def load_state_dict(self, state: State) -> None:
        self.load([state], 0, state)

    def load(self, states: Sequence[State], next_worker: int, whole: State) -> None:
        """Resume from the states of a loader's workers, or of this process, in a whole state."""
        for state, own in zip(states, self._slices_of(len(states)), strict=True):
            check_state(state, self._fingerprint_at(own), own)
        epoch = max(int(state["epoch"]) for state in states)
        loop = read_loop(whole, states, self.plan.steps)
        position = Position(epoch, states, next_worker).saved()
        moves = self.state.moves + 1
        self._resume_from(position, self.state._replace(moves=moves, last=position, loop=loop))

    def loop_state(self) -> State:
        """Return the key of a state for the position in loops; none without `steps`."""
        if self.plan.steps is None:
            return {}
        epoch, step, _ = self.state.loop
        return {"loop": {"epoch": epoch, "step": step, "steps": self.plan.steps}}

    def reload(self) -> None:
        """Let the next reading continue where an earlier one was left."""
        state = self.state
        if state.at is not None:  # a reading that failed, or another loop over this dataset
            self._resume_from(state.at.saved(), state)


def _packs_of(rows: Int64Array) -> Packs:
    segments = np.column_stack([rows[:, ROW + 1 :], rows[:, -1]])
    return Packs(segments=segments, ends=np.cumsum(np.bincount(rows[:, ROW])))
