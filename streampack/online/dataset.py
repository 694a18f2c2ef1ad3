"""`PackedIterableDataset`: mixes any iterables of samples and packs them as they arrive.

::

    source a --.                                       one pipeline in each worker of each rank:
    source b --+-- mixing --> packers (bounded) --> device batches
    source c --'

Each worker of each rank reads its own slice of each source and packs with its own bounded buffer. A
pack leaves as soon as it is full. Lengths are not known in advance, so nothing is planned and the
number of ranks and workers is fixed. For MDS streams, `PackedStreamingDataset` is elastic.

Cost: 5 to 10 us per sample, more with extra fields, plus the source. Memory: the packers' bounds
and one batch per worker.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from streampack.batch.batch import Batch
from streampack.batch.formats.registry import BatchFormat, Formatter, check_format, to_native
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError, ResumeError
from streampack.online.bucketing import Bucketing
from streampack.online.byte_budget import HeldBytes, added_bytes, batch_bytes, format_bytes
from streampack.online.epoch_quota import epoch_amounts
from streampack.online.packing_loop import OnlinePacker
from streampack.online.plan import FlowPlan
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.online.state import check_state, fingerprint, pack_state
from streampack.runtime.arguments import (
    check_batch_size,
    check_configs,
    check_epoch,
    show_dataset,
    with_hints,
)
from streampack.runtime.epoch_counter import SharedEpochCounter
from streampack.runtime.memory_budget import MemoryFootprint, max_prefetch
from streampack.runtime.rank_digest import RankView, digest_of
from streampack.runtime.thread_map import ordered_thread_map
from streampack.runtime.torch_transfer import parcel
from streampack.streams import IterableStream
from streampack.streams.registry import check_streams, unique_names
from streampack.types import State
from streampack.world import World

# Fingerprint fields that all ranks must share. Sources, amounts and batch sizes may differ.
SAME_ON_ALL_RANKS = ("seed", "shuffle_block_size", "max_seq_len", "method", "batching_method")
# Methods that cut a sample wherever a pack ends.
CUTTING_METHODS = ("next_fit", "concat")


def _same(item: Any) -> Any:
    return item


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begun:
    """An iteration of one process."""

    epoch: int
    place: WorkerSlice
    start: State | None
    """The state to resume from; None: the epoch's start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Before:
    """A dataset's position when an iteration began, for rolling that iteration back."""

    worker: int
    word: int
    """The epoch counter's entry for the worker."""
    at: State | None
    under_way: Begun | None
    next_epoch: int
    start: State | None
    is_elsewhere: bool


class FlowDataset(IterableDataset[Batch]):
    """Base of the online datasets: the current iteration, the epoch, and the state.

    Args:
        plan: The options that decide the batches.
        buffers: Memory limits.
        world: This process's rank; None: from torch.distributed if it is initialised, or from
            torchrun's variables.
        convert: Converts a native batch to the requested format.

    Raises:
        ConfigError: If the buffers cannot hold one batch.
    """

    def __init__(
        self,
        plan: FlowPlan,
        buffers: Buffers | None,
        world: World | None,
        convert: Formatter = to_native,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.streams = list(plan.streams)
        """The streams, named as in reports."""
        self.stream_names = list(plan.names)
        self.fingerprint = fingerprint(plan)
        """The options that decide the batches, as JSON. A state loads only where they are equal."""
        self._convert = convert
        self._format_bytes = format_bytes(convert, plan)
        self.buffers = buffers or Buffers()
        self.world = world or World.from_env(os.environ)
        self._finds_world = world is None
        self._ledger = SharedEpochCounter()
        self._num_iterations = 0
        self._parts: tuple[WorkerSlice, list[SourceSlice]] | None = None
        self._user: Begun | None = None  # the iteration that reads them
        self._reading: Any = None  # its generator, if a thread prefetches
        self._start: State | None = None
        self._is_start_own = False  # loaded in this worker, not inherited from the main process
        # The run's position; None: where the next iteration begins.
        self._at: State | None = None
        self._under_way: Begun | None = None  # the iteration that sets the position
        self._next_epoch = 0  # as of this process's last iteration
        self._before: _Before | None = None  # of an iteration that has no batch yet
        self._is_elsewhere = False  # a loader's workers hold the position
        self.num_moves = 0
        """Number of times a state was loaded or the epoch set."""
        max_prefetch(self.buffers, self.footprint(0), 1)

    def _check_world(self) -> None:
        if self._finds_world:
            self.world.check_group()

    def __repr__(self) -> str:
        plan = self.plan
        size = f"max_seq_len={plan.packing.max_seq_len}"
        if plan.bucketing is not None:
            size = f"max_tokens={plan.bucketing.max_tokens}"
        return show_dataset(self, self.stream_names, size, plan.batch_size, self.world)

    def __getstate__(self) -> dict[str, Any]:
        self._check_world()  # a spawned worker cannot see the training process's group
        # Iterators stay in the process that created them.
        return {
            **self.__dict__,
            "_parts": None,
            "_under_way": None,
            "_before": None,
            "_reading": None,
        }

    @property
    def digest(self) -> str:
        """A digest of the options that decide the batches, without the sources."""
        return digest_of(self.fingerprint)

    def rank_view(self) -> RankView:
        """Return the options that all ranks must share; their sources may differ."""
        recipe = {key: self.fingerprint[key] for key in SAME_ON_ALL_RANKS}
        return {"streams": [], "recipe": recipe}

    def footprint(self, num_workers: int) -> MemoryFootprint:
        """Return a rank's memory use with `num_workers` workers."""
        plan, num_packers = self.plan, 1
        packer_tokens, batch_tokens = (
            plan.packing.buffer_limit,
            plan.packing.max_seq_len * plan.batch_size,
        )
        if plan.bucketing is not None:
            packer_tokens = plan.packing.buffer_samples * plan.packing.max_seq_len
            batch_tokens = plan.bucketing.most_slots
        if plan.mixing.batching_method != "random":
            # Each stream has a packer, and one pack waiting for its slot.
            num_packers = len(plan.streams)
            packer_tokens += batch_tokens // plan.batch_size
        return MemoryFootprint(
            packer_tokens=num_packers * packer_tokens,
            batch_tokens=batch_tokens,
            num_workers=num_workers,
            plans_in_workers=num_workers > 0,
            batch_bytes=batch_bytes(plan),
            format_bytes=self._format_bytes or 0,
        )

    def convert(self, batch: Batch, ahead: int = 1) -> Any:
        """Convert a native batch to the requested format.

        Args:
            batch: A native batch.
            ahead: Most batches resident together.

        Raises:
            ConfigError: If the format is a user's function and the tensors that it adds do not fit
                `Buffers.worker_bytes`.
        """
        made, limit = self._convert(batch), self.buffers.worker_bytes
        if self._format_bytes is None and limit is not None:
            added = added_bytes(made, batch)
            needed = added + ahead * batch_bytes(self.plan)
            if needed > limit:
                raise ConfigError(
                    f"Buffers(worker_bytes={limit}) cannot hold {ahead} native batches and the "
                    f"{added} bytes that batch_format adds to one; set worker_bytes to at least "
                    f"{needed}, or lower batch_size or prefetch_factor"
                )
        return made

    def set_epoch(self, epoch: int) -> None:
        """Start the next loop at the beginning of `epoch`, with the sources restarted.

        This replaces a loaded state and the current position: until the next loop, states point to
        the start of `epoch`. A loop already running continues to its end but no longer changes the
        position. Later loops count up from `epoch`.

        Raises:
            ConfigError: If it is not an integer of at least 0, or more than a state can hold.
        """
        self._go_to(check_epoch(epoch), None)

    def _go_to(self, epoch: int, start: State | None) -> None:
        self._start, self._is_start_own = start, get_worker_info() is not None
        self._at = self._under_way = self._before = None
        self._is_elsewhere = False
        self.num_moves += 1
        self._ledger.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or resume from a loaded state.

        In a torch worker, iterate over the worker's share. The iteration begins at its first batch.

        Raises:
            ResumeError: If the state belongs to another worker.
        """
        # A worker begins immediately: its state may be requested before its first batch.
        if get_worker_info() is not None:
            return self._deliver(self.begin())
        self._check_world()
        self.ask()
        return self._deliver(None)

    def _deliver(self, begun: Begun | None) -> Generator[Any, None, None]:
        begun = begun or self.begin()
        try:
            for batch, state in self.batches(begun):
                made = parcel(self.convert(batch))
                self.note(begun, state)
                del batch
                yield made
                del made  # free it before the next one is made
            if get_worker_info() is None:  # a worker's epoch may still run in other workers
                self.note(begun, None)
        except GeneratorExit:
            raise
        except BaseException:
            self.abandon()
            raise

    def ask(self) -> None:
        """Note an iter() call: until its first batch, the position is that iteration's start.

        Nothing is read. Some trainers call iter() only to test for support and drop the result.
        """
        self._at = None

    def begin(self) -> Begun:
        """Begin an epoch or resume from a loaded state; in a torch worker, for the worker's share.

        Until the first batch is noted, `abandon` restores the previous position.

        Raises:
            ResumeError: If the state belongs to another worker.
        """
        self._check_world()
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        max_prefetch(self.buffers, self.footprint(info.num_workers if info else 0), 1)
        if info is not None and any(stream.tokenizer is not None for stream in self.plan.streams):
            # The workers provide the parallelism: tokenizer threads in each would only compete.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        token = info.seed - info.id if info else os.getpid()
        key = f"{token}:{self._num_iterations}"
        self._num_iterations += 1
        if self._reading is not None:
            self._reading.close()  # its thread would continue to read from the same sources
            self._reading = None
        self._before = _Before(
            worker=worker,
            word=self._ledger.word(worker),
            at=self._at,
            under_way=self._under_way,
            next_epoch=self._next_epoch,
            start=self._start,
            is_elsewhere=self._is_elsewhere,
        )
        try:
            place = self.place(worker, num_workers)
            start = self._take_start(place)
            epoch = self._ledger.begin(worker, key, None if start is None else int(start["epoch"]))
        except BaseException:
            self.abandon()
            raise
        begun = Begun(epoch=epoch, place=place, start=start)
        self._under_way = self._user = begun
        self._is_elsewhere = False
        self._at = start or self.state_at_start(epoch, place)
        self._next_epoch = self._ledger.next_epoch
        return begun

    def read_ahead(self, begun: Begun, ahead: int) -> Iterator[tuple[Batch, State]]:
        """Yield the items of `batches` from a prefetch thread, until a later iteration begins."""
        self._reading = reading = ordered_thread_map(self.batches(begun, ahead), _same, ahead)
        yield from reading
        self.check_turn(begun)

    def note(self, begun: Begun, state: State | None) -> None:
        """Record an iteration's position; None: its end.

        Ignored if a later iteration has begun or a state was loaded since.
        """
        if self._before is not None:
            # A state from an epoch's end starts the next epoch.
            self._next_epoch = self._ledger.next_epoch
        self._before = None
        if begun is self._under_way:
            self._at = state

    def abandon(self) -> None:
        """Note that an iteration failed; roll it back if it has delivered no batch."""
        before, self._before = self._before, None
        if before is None:
            return
        self._ledger.put_back(before.worker, before.word)
        self._at, self._next_epoch = before.at, before.next_epoch
        self._under_way, self._start = before.under_way, before.start
        self._is_elsewhere = before.is_elsewhere

    def note_elsewhere(self) -> None:
        """Note that a loader's workers hold the run's position from now on."""
        self._at = self._under_way = None
        self._is_elsewhere = True

    def _take_start(self, place: WorkerSlice) -> State | None:
        """Return the loaded state if it has not been used yet.

        Raises:
            ResumeError: If it was loaded in the main process and belongs to another worker.
        """
        start, self._start = self._unused_start, None
        if start is not None and not self._is_start_own:
            check_state(start, self.fingerprint, place)
        return start

    @property
    def _unused_start(self) -> State | None:
        # Each new worker, in every epoch, inherits a copy of the main process's loaded state.
        is_used = not self._is_start_own and self._ledger.has_begun
        return None if is_used else self._start

    def place(self, worker: int, num_workers: int) -> WorkerSlice:
        """Return the slice of the sources that belongs to a worker of this rank."""
        return WorkerSlice(
            device=self.world.place,
            num_devices=self.world.num_devices,
            worker=worker,
            num_workers=num_workers,
        )

    def batches(self, begun: Begun, ahead: int = 1) -> Generator[tuple[Batch, State], None, None]:
        """Yield the native batches of an iteration, each with the state after it.

        Args:
            begun: An iteration of this process.
            ahead: Most batches resident together.

        Raises:
            ConfigError: While iterating: if payloads do not fit `Buffers.worker_bytes`.
        """
        epoch, start = begun.epoch, begun.start
        num_batches = yield from self._batches(begun, epoch, start, ahead)
        if start is not None and not num_batches and get_worker_info() is None:
            # The state was taken after the epoch's last batch, so continue with the next epoch.
            key = f"after {epoch}:{self._num_iterations}"
            self._ledger.begin(begun.place.worker, key, epoch + 1)
            yield from self._batches(begun, epoch + 1, None, ahead)

    def _batches(
        self, begun: Begun, epoch: int, start: State | None, ahead: int
    ) -> Generator[tuple[Batch, State], None, int]:
        flow = self._flow(epoch, begun.place, ahead)
        if start is None or start["flow"] is None:
            flow.begin()
        else:
            flow.load_state_dict(start["flow"])
        num_batches = 0
        while (batch := flow.next_batch()) is not None:
            num_batches += 1
            yield batch, pack_state(self.fingerprint, begun.place, epoch, flow.state_dict())
            del batch  # free it before the next one is made
            self.check_turn(begun)
        return num_batches

    def check_turn(self, begun: Begun) -> None:
        """Check that no later iteration reads the same sources.

        Raises:
            ConfigError: If a later iteration has begun.
        """
        if self._user is not begun:
            raise ConfigError(
                "a later iteration of this dataset has begun, and iterables are gone through "
                "by one at a time; end one before the next, or make a dataset for each"
            )

    def _flow(self, epoch: int, place: WorkerSlice, ahead: int) -> OnlinePacker:
        if self._parts is None or self._parts[0] != place:
            self._parts = (place, self.plan.parts(place))
        for part in self._parts[1]:
            part.check_not_used_up(epoch)
        fixed = (self._format_bytes or 0) + ahead * batch_bytes(self.plan)
        held = HeldBytes(self.buffers.worker_bytes, fixed, ahead)
        return OnlinePacker(self.plan, place, self._parts[1], epoch, held)

    # State.

    def state_at_start(self, epoch: int, place: WorkerSlice) -> State:
        """Return the state of a worker at the start of an epoch."""
        return pack_state(self.fingerprint, place, epoch, None)

    def state_dict(self) -> State:
        """Return this process's state after the last delivered batch, as JSON.

        It contains each source's own state, unchanged.

        Raises:
            ResumeError: If a loader's workers iterate, so that this process has no position.
        """
        is_counted = self._ledger.has_begun and self._ledger.next_epoch != self._next_epoch
        if get_worker_info() is None and (self._is_elsewhere or is_counted):
            raise ResumeError(
                "batches were delivered by a loader's workers, so the dataset cannot know where "
                "they stand; use PackedDataLoader or torchdata's StatefulDataLoader, and the "
                "loader's state_dict()"
            )
        state = self.state_here()
        # In a worker, no copy is needed: torch pickles the state into a pipe at every batch.
        return state if get_worker_info() else copy.deepcopy(state)

    def is_told_by(self, begun: Begun | None) -> bool:
        """Whether an iteration is the current one: no later one began and no state was loaded."""
        return begun is not None and begun is self._under_way

    def state_here(self) -> State:
        """Return the state of this process's own iteration, without a copy or a check."""
        if self._at is not None:
            return self._at
        info = get_worker_info()
        place = self.place(info.id, info.num_workers) if info else self.place(0, 1)
        return self.next_state(place)

    def next_state(self, place: WorkerSlice) -> State:
        """Return the state from which a worker's next iteration begins."""
        return self._unused_start or self.state_at_start(self._ledger.next_epoch, place)

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next iteration.

        Raises:
            ResumeError: If it belongs to another rank, worker, world or dataset. The message names
                the difference.
        """
        info = get_worker_info()
        place = self.place(info.id, info.num_workers) if info else self.place(0, 1)
        check_state(state, self.fingerprint, place)
        self._go_to(int(state["epoch"]), copy.deepcopy(state))


class PackedIterableDataset(FlowDataset):
    """Iterables of samples, mixed and packed on the fly.

    Args:
        streams: The sources and their weights; streams without weights count equally.
        packing: How samples share packs.
        mixing: The share of each stream, the batches it appears in, and where an epoch ends.
        order: With shuffle, indexed sources (lists, map-style datasets) are shuffled by the seed;
            None: they are read in stored order. Other sources keep their own order.
        buffers: Memory limits.
        batch_size: Packs in a device batch.
        batch_format: The batch layout: "native", a trainer's format by name such as "hf", or a
            function of the native batch; see `streampack.formats`.
        world: This process's rank; None: from torch.distributed if it is initialised, or from
            torchrun's variables.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: if a sample is invalid, a source fails or is empty, or a second
            epoch needs a source that can be iterated only once, such as a generator.

    Batches have the keys of `PackedStreamingDataset` batches, and the streams' extra fields.
    `position` counts packs over all ranks and workers as if they advanced in step. Iterate with
    `PackedDataLoader`, torchdata's ``StatefulDataLoader`` or torch's ``DataLoader(dataset,
    batch_size=None)``.

    Ranks may take unequal numbers of steps in an epoch: each packs its own samples, and the number
    of packs they fill is not known in advance. Where ranks synchronise at every step (DDP, FSDP),
    end the epoch after a step count that all ranks reach, or stop all ranks when the first ends.

    >>> dataset = PackedIterableDataset(
    ...     [IterableStream([[1, 2, 3], [4, 5]])], packing=Packing(max_seq_len=4), batch_size=2)
    >>> next(iter(dataset))["tokens"].tolist()
    [[1, 2, 3, 0], [4, 5, 0, 0]]
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - the public face; four of them are configs
        self,
        streams: Sequence[IterableStream],
        *,
        packing: Packing,
        mixing: Mixing | None = None,
        order: Order | None = None,
        buffers: Buffers | None = None,
        batch_size: int = 1,
        batch_format: BatchFormat = "native",
        world: World | None = None,
    ) -> None:
        check_streams(streams, IterableStream)
        check_configs(packing=packing, mixing=mixing, order=order, buffers=buffers, world=world)
        check_options(type(self).__name__, mixing, order, buffers, epoch_ends=("pad", "drop"))
        check_fields(streams, packing)
        plan = flow_plan(
            streams,
            packing,
            mixing or Mixing(),
            order,
            batch_size=check_batch_size(batch_size, packing.max_seq_len),
        )
        super().__init__(plan, buffers, world, check_format(batch_format, packing, plan.batch_size))


def flow_plan(
    streams: Sequence[IterableStream],
    packing: Packing,
    mixing: Mixing,
    order: Order | None,
    *,
    batch_size: int,
    bucketing: Bucketing | None = None,
) -> FlowPlan:
    """Build the plan; without an order, samples are read in stored order."""
    is_shuffled, order = order is not None and order.shuffle, order or Order()
    names = unique_names(
        [stream.name or f"stream-{number}" for number, stream in enumerate(streams)]
    )
    return FlowPlan(
        # Named as in messages and reports.
        streams=tuple(replace(each, name=name) for each, name in zip(streams, names, strict=True)),
        names=tuple(names),
        packing=packing,
        mixing=mixing,
        amounts=epoch_amounts(streams, names, mixing, order.seed),
        batch_size=batch_size,
        seed=order.seed,
        shuffle_block_size=order.block_size if is_shuffled else None,
        bucketing=bucketing,
    )


def check_options(
    name: str,
    mixing: Mixing | None,
    order: Order | None,
    buffers: Buffers | None,
    *,
    epoch_ends: tuple[str, ...],
) -> None:
    """Check for options that online datasets do not support.

    Raises:
        ConfigError: Naming the supported values, and the dataset that supports more.
    """
    possible: list[tuple[Mixing | Order | Buffers | None, str, tuple[str | None, ...]]] = [
        (mixing, "epoch_end", epoch_ends),
        (mixing, "global_batch_size", (None,)),
        (order, "num_lanes", (None,)),
        (buffers, "cache_limit", (None,)),
    ]
    for config, key, works in possible:
        value = None if config is None else getattr(config, key)
        if config is not None and value not in works:
            raise ConfigError(
                f"{name} cannot do {key}={value!r}, only "
                f"{' or '.join(map(repr, works))}; PackedStreamingDataset can, from MDS streams"
            )


def check_fields(streams: Sequence[IterableStream], packing: Packing) -> None:
    """Check that the streams' extra fields can share a batch, and fit the packing method.

    Raises:
        ConfigError: Naming the fields.
    """
    dtypes: dict[str, str] = {}
    for stream in streams:
        for name, dtype in stream.token_fields.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise ConfigError(
                    f"token_fields: {name!r} is {dtypes[name]!r} in one stream and {dtype!r} in "
                    "another; a batch has one array for both, so give it one dtype"
                )
        cuts = packing.method in CUTTING_METHODS or packing.split_gap is not None
        if stream.payloads and cuts:
            what = f"split_gap={packing.split_gap}" if packing.split_gap is not None else ""
            raise ConfigError(
                f"payloads={dict(stream.payloads)} must stay with their samples, but "
                f"{what or f'method={packing.method!r}'} cuts samples where a pack ends; use "
                "method='exact_fit' without split_gap"
            )
