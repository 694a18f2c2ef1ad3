"""The engine of the online datasets: iterations of one worker, their batches, and states.

::

    begin --> OnlineIteration --> OnlinePacker --> native batch, state --convert--> batch

Each worker of each rank has a copy. It reads its own slice of each source.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.utils.data import get_worker_info

from streampack.batch.batch import Batch
from streampack.batch.formats.registry import Formatter
from streampack.batch.slices import slice_batch
from streampack.config import Buffers
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.gather.context_slice import ContextSlice
from streampack.online.byte_budget import (
    HeldBytes,
    added_bytes,
    batch_bytes,
    footprint_of,
    format_bytes,
)
from streampack.online.even_steps import EvenSteps, Loops, Read, delivered
from streampack.online.item_decoder import limit_tokenizer_threads
from streampack.online.live_queue import fitting_window
from streampack.online.packing_loop import OnlinePacker
from streampack.online.plan import FlowPlan
from streampack.online.source_slice import SourceSlice, most_empty_passes
from streampack.online.source_view import source_view
from streampack.online.state import check_state, flow_fingerprint, saved_state, worker_state
from streampack.online.worker_slice import WorkerSlice
from streampack.runtime.memory_budget import MemoryFootprint, max_prefetch
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import RankView
from streampack.runtime.resumable import ResumableRun
from streampack.runtime.thread_map import ordered_thread_map, prefetched
from streampack.runtime.whole_batch import whole
from streampack.streams.source_traits import has_index
from streampack.types import State
from streampack.world import World

# Fingerprint fields that all ranks must share. Amounts and batch sizes may differ.
SAME_ON_ALL_RANKS = ("seed", "shuffle_block_size", "max_seq_len", "method", "batching_method")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnlineIteration:
    """An iteration of one process."""

    epoch: int
    worker_slice: WorkerSlice
    start: State | None
    """The state to resume from, or None for the epoch's start."""


class OnlineEngine(ResumableRun[OnlineIteration, State]):
    """Iterates over a process's slice of the sources, and resumes from its states.

    `context` is the slice of each row that this rank gets, or None for whole rows.
    """

    ROLLED_BACK: ClassVar = (*ResumableRun.ROLLED_BACK, "_start", "_has_moved_away")

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
        self.batch_size = plan.batch_size
        self.kind, self.size = "PackedIterableDataset", plan.packing.size
        if plan.bucketing is not None:
            self.kind = "BucketedIterableDataset"
            self.size = f"max_tokens={plan.bucketing.max_tokens}"
        self._fingerprint = flow_fingerprint(plan)
        self._convert = convert
        self._context = context
        self._format_bytes = format_bytes(convert, plan)
        self._slices: tuple[WorkerSlice, list[SourceSlice]] | None = None
        self._user: OnlineIteration | None = None  # the iteration that reads them
        self._reading: Any = None  # its generator, if a thread prefetches
        self._start: State | None = None
        self._is_start_own = False  # loaded in this worker, not inherited from the main process
        self._has_moved_away = False  # a loader's workers hold the position
        self.epoch_of_loader: int | None = None
        """In a loader's worker: the epoch of the iteration that the loader began."""
        self.loops = Loops(
            plan.steps,
            max(most_empty_passes(each.source, is_sharded=each.sharded) for each in plan.streams),
        )
        """This rank's position in loops of `steps`."""
        self._even_steps: EvenSteps | None = None  # of a loop over the dataset itself
        max_prefetch(buffers, self.footprint(0), 1)

    def __getstate__(self) -> dict[str, Any]:
        # Iterators stay in the process that created them.
        own = {"_slices": None, "_reading": None, "_even_steps": None}
        return super().__getstate__() | own | {"loops": copy.copy(self.loops)}

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
        window = self.pack_window(num_workers) * self.plan.packing.max_seq_len
        return replace(footprint, packer_tokens=footprint.packer_tokens + window)

    def pack_window(self, num_workers: int) -> int:
        """Return the packs that each of `num_workers` workers shuffles together; 0: no shuffle."""
        return fitting_window(self.plan, self.buffers, num_workers)

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
                    f"{needed}, or lower batch_size or prefetch_factor"
                )
        return converted

    def provenance(self, native: Batch) -> Provenance:
        """Return the provenance of a native batch."""
        return Provenance.of_native(
            native,
            run=f"a {self.kind} with steps={self.plan.steps!r}",
            stream_names=self.plan.names,
            packing=self.plan.packing,
            context=self._context,
            num_slices=self.world.context_parallel,
            convert=self._convert,
        )

    def slice_of(self, worker: int, num_workers: int) -> WorkerSlice:
        return WorkerSlice(
            device=self.world.place,
            num_devices=self.world.num_devices,
            worker=worker,
            num_workers=num_workers,
        )

    def _own_slice(self) -> WorkerSlice:
        info = get_worker_info()
        return self.slice_of(info.id, info.num_workers) if info else self.slice_of(0, 1)

    # Iteration.

    def batches(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            if self.plan.steps is not None:  # torch's workers know nothing of each other
                raise ConfigError(
                    f"steps={self.plan.steps!r} is counted in the process of the training loop, "
                    "not in torch's workers; iterate with PackedDataLoader, or set num_workers=0"
                )
            # A worker begins immediately: its state may be requested before its first batch.
            return delivered(self.read_epoch(self.begin()))
        self.check_world()
        if self.plan.steps is not None:
            if self._even_steps is None:
                self._even_steps = EvenSteps(self.loops, self, self.world, self.counter)
            return self.until_moved(self._even_steps.loop())
        self.ask()
        return self.until_moved(delivered(self.read_epoch()))

    def until_moved(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield batches; a ConfigError follows once a state is loaded or the epoch set."""
        num_moves = self.num_moves
        with closing(batches):
            for batch in batches:
                if num_moves != self.num_moves:
                    raise self.moved()
                yield batch
                del batch  # free it before the next one is made

    def read_epoch(self, begun: OnlineIteration | None = None) -> Generator[Read, None, None]:
        """Read the next epoch, or the rest of the one in a loaded state, unless one has `begun`."""
        with self.iteration(begun) as iteration:
            for native, state in self.native_batches(iteration):
                batch = whole(self.convert(native))
                del native

                def note(to: State = state) -> None:
                    self.note(iteration, to)

                yield Read(batch, int(state["epoch"]), note)
                del batch  # free it before the next one is made
            if get_worker_info() is None:  # a worker's epoch may still run in other workers
                self.note(iteration, None)

    def _begin(self, worker: int, key: str) -> OnlineIteration:
        info, worker_slice = get_worker_info(), self._own_slice()
        max_prefetch(self.buffers, self.footprint(info.num_workers if info else 0), 1)
        if info is not None:
            limit_tokenizer_threads(self.plan.streams)
        if self._reading is not None:
            self._reading.close()  # its thread would continue to read from the same sources
            self._reading = None
        start, self._start = self._unused_start, None
        if start is not None and not self._is_start_own:
            self.check(start, worker_slice)
        wanted = self.epoch_of_loader if start is None else int(start["epoch"])
        epoch = self.counter.begin(worker, key, wanted)
        iteration = OnlineIteration(epoch=epoch, worker_slice=worker_slice, start=start)
        self._user = iteration
        self._has_moved_away = False
        self.at = start or self._state_at_start(epoch, worker_slice)
        return iteration

    @property
    def _unused_start(self) -> State | None:
        # Each new worker, in every epoch, inherits a copy of the main process's loaded state.
        is_used = not self._is_start_own and self.counter.has_begun
        return None if is_used else self._start

    def native_batches(
        self, iteration: OnlineIteration, ahead: int = 1
    ) -> Generator[tuple[Batch, State], None, None]:
        """Yield the native batches of an iteration, each with the state after it."""
        epoch, start = iteration.epoch, iteration.start
        num_batches = yield from self._epoch(iteration, epoch, start, ahead)
        if num_batches or get_worker_info() is not None:
            return
        if start is not None:
            # The state was taken after the epoch's last batch, so continue with the next epoch.
            key = f"after {epoch}:{self._num_iterations}"
            self.counter.begin(iteration.worker_slice.worker, key, epoch + 1)
            if self.is_current(iteration):
                self._epoch_after = self.counter.next_epoch
            epoch += 1
            num_batches = yield from self._epoch(iteration, epoch, None, ahead)
        if not num_batches:
            self.check_drops(epoch)

    def check_drops(self, epoch: int) -> None:
        """Refuse an epoch of this rank without a batch, where `epoch_end` drops short ones."""
        if self.plan.mixing.epoch_end == "drop" and self.plan.steps is None:
            raise DataError(
                f"epoch {epoch} has no batch on rank {self.world.rank}: no worker filled "
                f"batch_size={self.batch_size} packs, and epoch_end='drop' drops fewer; set "
                "Mixing(epoch_end='pad'), lower batch_size, or use fewer workers"
            )

    def read_ahead(self, iteration: OnlineIteration, ahead: int) -> Iterator[tuple[Batch, State]]:
        """Yield `native_batches` from a prefetch thread, until a later iteration begins."""
        batches = self.native_batches(iteration, ahead)
        # The batch that the loop has counts towards `ahead`, and so does the one at hand.
        if all(has_index(stream.source) for stream in self.plan.streams):
            reading = prefetched(batches, ahead - 1)
        else:
            # One thread reads: a generator may hold what only the thread that made it can use, such
            # as a connection to SQLite.
            reading = ordered_thread_map(batches, lambda batch: batch, ahead - 1, at_hand=1)
        self._reading = reading
        yield from reading
        self._check_current(iteration)

    def _epoch(
        self, iteration: OnlineIteration, epoch: int, start: State | None, ahead: int
    ) -> Generator[tuple[Batch, State], None, int]:
        worker_slice = iteration.worker_slice
        fingerprint = self._fingerprint_at(worker_slice)
        flow = self._packer(epoch, worker_slice, ahead)
        if start is None or start["flow"] is None:
            flow.begin()
        else:
            flow.load_state_dict(start["flow"])
        num_batches = 0
        while (batch := flow.next_batch()) is not None:
            num_batches += 1
            if self._context is not None:
                batch = slice_batch(batch, self._context)
            yield batch, worker_state(fingerprint, worker_slice, epoch, flow.state_dict())
            del batch  # free it before the next one is made
            self._check_current(iteration)
        return num_batches

    def _check_current(self, iteration: OnlineIteration) -> None:
        if self._user is not iteration:
            raise ConfigError(
                "a later iteration of this dataset has begun, and iterables are gone through "
                "by one at a time; end one before the next, or make a dataset for each"
            )

    def _packer(self, epoch: int, worker_slice: WorkerSlice, ahead: int) -> OnlinePacker:
        if self._slices is None or self._slices[0] != worker_slice:
            self._slices = (worker_slice, self.plan.slices(worker_slice))
        for source in self._slices[1]:
            source.check_not_used_up(epoch)
        fixed = (self._format_bytes or 0) + ahead * batch_bytes(self.plan)
        held = HeldBytes(self.buffers.worker_bytes, fixed, ahead)
        window = self.pack_window(worker_slice.num_workers)
        return OnlinePacker(self.plan, worker_slice, self._slices[1], epoch, held, window)

    # State.

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch; without effect if it is the next one anyway."""
        is_next = self.plan.steps is not None and self.loops.next == (epoch, 0)
        self.loops.go_to(epoch)
        if not is_next:
            self.num_moves += 1
            self.restart(epoch)

    def restart(self, epoch: int, start: State | None = None) -> None:
        """Read from a state in an epoch, or from the epoch's start."""
        self._start, self._is_start_own = start, get_worker_info() is not None
        self._has_moved_away = False
        self.loops.num_moves += 1
        self.go_to(epoch)

    def move_away(self) -> None:
        """Note that a loader's workers hold the run's position from now on."""
        self.at = self._current = None
        self._has_moved_away = True

    def _state_at_start(self, epoch: int, worker_slice: WorkerSlice) -> State:
        return worker_state(self._fingerprint_at(worker_slice), worker_slice, epoch, None)

    def _fingerprint_at(self, worker_slice: WorkerSlice) -> dict[str, Any]:
        """Return the fingerprint with the window that the buffers allow a worker."""
        if not self.plan.pack_shuffle:
            return self._fingerprint
        return self._fingerprint | {"pack_shuffle": self.pack_window(worker_slice.num_workers)}

    def state_dict(self) -> State:
        info = get_worker_info()
        if self.is_elsewhere or (info is None and self._has_moved_away):
            raise ResumeError(
                "batches were delivered by a loader's workers, so the dataset cannot know where "
                "they stand; use PackedDataLoader or torchdata's StatefulDataLoader, and the "
                "loader's state_dict()"
            )
        return saved_state(self.position() | ({} if info else self.loops.state_dict()))

    def next_state(self, worker_slice: WorkerSlice) -> State:
        return self._unused_start or self._state_at_start(self.counter.next_epoch, worker_slice)

    def check(self, state: State, worker_slice: WorkerSlice) -> None:
        check_state(state, self._fingerprint_at(worker_slice), worker_slice)

    def load_state_dict(self, state: State) -> None:
        self.check(state, self._own_slice())
        loop = self.loops.read(state)
        self.num_moves += 1
        self.restart(int(state["epoch"]), saved_state(state))
        self.loops.go_to(*loop)

    def position(self) -> State:
        """Return the state of this process's own iteration, without a copy or a check."""
        return self.at if self.at is not None else self.next_state(self._own_slice())

    def reload(self) -> None:
        """Let `read_epoch` continue where an earlier reading was left."""
        self.check_not_moved_away()
        if self.at is not None:  # a reading that failed, or another loop over this dataset
            self.restart(int(self.at["epoch"]), saved_state(self.at))

    def check_not_moved_away(self) -> None:
        """Refuse to continue a loop of a loader's workers; only they know where it ended."""
        if self._has_moved_away:
            raise ConfigError(
                f"with steps={self.plan.steps!r} a loop continues where the last one ended, which "
                "only the workers of the loader that ran it know; iterate that loader again, load "
                "its state_dict() into this one, or call dataset.set_epoch(n)"
            )
