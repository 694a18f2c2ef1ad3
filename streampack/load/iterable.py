"""`PackedIterableDataset`: any iterables of samples in, mixed and packed as they come.

::

    source a --.                                       one flow in each worker of each rank:
    source b --+-- mixing --> packers (bounded) --> device batches
    source c --'

Each worker of each rank takes its own part of each source and packs with its own bounded buffer. A
pack leaves as soon as it is full. Lengths are not known ahead, so nothing is planned: for MDS
streams `PackedStreamingDataset` is elastic where this is not.

Cost: 5 to 10 us a sample, more with extra fields, plus the source. Memory: the packers' bounds and
one batch a worker.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from streampack.assemble import Batch, BatchFormat, Formatter, check_format, to_native
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError, ResumeError
from streampack.load.arguments import (
    check_batch_size,
    check_configs,
    check_epoch,
    check_streams,
    show_dataset,
    with_hints,
)
from streampack.load.buckets import Bucketing
from streampack.load.buffers import Footprint, batches_ahead
from streampack.load.build import unique_names
from streampack.load.iterable_amounts import epoch_amounts
from streampack.load.iterable_bytes import (
    HeldBytes,
    added_bytes,
    batch_bytes,
    format_bytes,
)
from streampack.load.iterable_flow import PackFlow
from streampack.load.iterable_plan import FlowPlan
from streampack.load.iterable_state import check_state, fingerprint, pack_state
from streampack.load.ledger import EpochLedger
from streampack.load.parcel import parcel
from streampack.streams import IterableStream
from streampack.streams.part import PartPlace, SourcePart
from streampack.types import State
from streampack.world import World

__all__ = ["FlowDataset", "PackedIterableDataset", "check_fields", "check_options", "flow_plan"]

# Methods that cut samples wherever a pack ends.
CUTTING_METHODS = ("next_fit", "concat")


class FlowDataset(IterableDataset[Batch]):
    """What all datasets of the buffered way share: whose turn, which epoch, where it stands.

    Args:
        plan: What decides the batches.
        buffers: How much may be resident at once.
        world: This process among the others; None: as torch.distributed, if it is initialised, or
            torchrun's variables say.
        convert: Gives a native batch the look that was asked for.

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
        self.stream_names = list(plan.names)
        self.fingerprint = fingerprint(plan)
        """What decides the batches, as JSON: a state belongs to datasets with the same."""
        self._convert = convert
        self._format_bytes = format_bytes(convert, plan)
        self.buffers = buffers or Buffers()
        self.world = world or World.from_env(os.environ)
        self._finds_world = world is None
        self._ledger = EpochLedger()
        self._num_iterations = 0
        self._parts: tuple[PartPlace, list[SourcePart]] | None = None
        self._start: State | None = None
        self._is_start_own = False  # loaded by this very worker
        self._delivered: State | None = None
        self._next_epoch = 0  # when this process began to iterate, if it did
        batches_ahead(self.buffers, self.footprint(0), 1)

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
        self._check_world()  # a worker that is spawned cannot see what the training process joined
        # Iterators stay in the process that began them.
        return {**self.__dict__, "_parts": None}

    def footprint(self, num_workers: int) -> Footprint:
        """Return what a rank holds with so many workers."""
        plan, num_packers = self.plan, 1
        packer_tokens, batch_tokens = (
            plan.packing.buffer_limit,
            plan.packing.max_seq_len * plan.batch_size,
        )
        if plan.bucketing is not None:
            packer_tokens = plan.packing.buffer_samples * plan.packing.max_seq_len
            batch_tokens = plan.bucketing.most_slots
        if plan.mixing.batching_method != "random":
            # A packer each, and one pack each that waits for its slot.
            num_packers = len(plan.streams)
            packer_tokens += batch_tokens // plan.batch_size
        return Footprint(
            packer_tokens=num_packers * packer_tokens,
            batch_tokens=batch_tokens,
            num_workers=num_workers,
            plans_in_workers=num_workers > 0,
            batch_bytes=batch_bytes(plan),
            format_bytes=self._format_bytes or 0,
        )

    def convert(self, batch: Batch, ahead: int = 1) -> Any:
        """Give a native batch the look that was asked for.

        Args:
            batch: One of `ahead` that may be there at once.
            ahead: How many.

        Raises:
            ConfigError: If that is a function of one's own, and what it adds does not fit
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
        """Make `epoch` the next one; sources that can be iterated again start again.

        Raises:
            ConfigError: If it is no integer of at least 0, or more than a state can hold.
        """
        number = check_epoch(epoch)
        self._start = self._delivered = None
        self._ledger.set_epoch(number)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on where a loaded state says; in a torch worker, its share.

        Raises:
            ResumeError: If that state is not of this worker.
        """
        return map(parcel, map(self.convert, self.native_batches()))

    def native_batches(self, ahead: int = 1) -> Iterator[Batch]:
        """Begin an epoch as iterating does; its batches are native ones, whatever was asked for.

        Args:
            ahead: How many of them may be there at once.

        Raises:
            ConfigError: While iterating: if payloads do not fit `Buffers.worker_bytes`.
        """
        self._check_world()
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        batches_ahead(self.buffers, self.footprint(info.num_workers if info else 0), 1)
        if info is not None and any(stream.tokenizer is not None for stream in self.plan.streams):
            # The workers are the parallelism: threads in each would only take turns.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        place = self.place(worker, num_workers)
        start = self._take_start(place)
        token = info.seed - info.id if info else os.getpid()
        key = f"{token}:{self._num_iterations}"
        self._num_iterations += 1
        epoch = self._ledger.begin(worker, key, None if start is None else int(start["epoch"]))
        # At once, not at the first batch: a worker may be asked for its state before that.
        self._delivered = start or self.state_at_start(epoch, place)
        self._next_epoch = self._ledger.next_epoch
        return self._batches(epoch, place, start, ahead)

    def _take_start(self, place: PartPlace) -> State | None:
        """Return the state to go on from, if one was loaded and nobody did so before.

        Raises:
            ResumeError: If it was loaded beside the workers, and is not of this one.
        """
        start, self._start = self._unused_start, None
        if start is not None and not self._is_start_own:
            check_state(start, self.fingerprint, place)
        return start

    @property
    def _unused_start(self) -> State | None:
        # Every worker that is made gets a copy of what was loaded beside it, in each epoch anew.
        is_used = not self._is_start_own and self._ledger.has_begun
        return None if is_used else self._start

    def place(self, worker: int, num_workers: int) -> PartPlace:
        """Return which part of the sources a worker of this rank takes."""
        return PartPlace(
            device=self.world.place,
            num_devices=self.world.num_devices,
            worker=worker,
            num_workers=num_workers,
        )

    def _batches(
        self, epoch: int, place: PartPlace, start: State | None, ahead: int
    ) -> Iterator[Batch]:
        flow = self._flow(epoch, place, ahead)
        if start is None or start["flow"] is None:
            flow.begin()
        else:
            flow.load_state_dict(start["flow"])
        num_batches = 0
        while (batch := flow.next_batch()) is not None:
            num_batches += 1
            self._delivered = pack_state(self.fingerprint, place, epoch, flow.state_dict())
            yield batch
            del batch  # not while the next is made
        if start is not None and not num_batches and get_worker_info() is None:
            # The state was taken after the epoch's last batch: what follows is the next epoch.
            self._ledger.begin(place.worker, f"after {epoch}:{self._num_iterations}", epoch + 1)
            self._next_epoch = self._ledger.next_epoch
            yield from self._batches(epoch + 1, place, None, ahead)
        elif get_worker_info() is None:
            self._delivered = self.state_at_start(epoch + 1, place)

    def _flow(self, epoch: int, place: PartPlace, ahead: int) -> PackFlow:
        if self._parts is None or self._parts[0] != place:
            self._parts = (place, self.plan.parts(place))
        for part in self._parts[1]:
            part.check_not_used_up(epoch)
        fixed = (self._format_bytes or 0) + ahead * batch_bytes(self.plan)
        held = HeldBytes(self.buffers.worker_bytes, fixed, ahead)
        return PackFlow(self.plan, place, self._parts[1], epoch, held)

    # Where it stands.

    def state_at_start(self, epoch: int, place: PartPlace) -> State:
        """Return the state of a worker that has delivered nothing of an epoch."""
        return pack_state(self.fingerprint, place, epoch, None)

    def state_dict(self) -> State:
        """Return where this process stands after the batch last delivered, as JSON.

        A source's own state is part of it as the source gives it.

        Raises:
            ResumeError: If this process cannot know, because workers of a loader iterate.
        """
        elsewhere = self._delivered is None or self._ledger.next_epoch != self._next_epoch
        if get_worker_info() is None and elsewhere and self._ledger.has_begun:
            raise ResumeError(
                "batches were delivered by a loader's workers, so the dataset cannot know where "
                "they stand; use PackedDataLoader or torchdata's StatefulDataLoader, and the "
                "loader's state_dict()"
            )
        state = self.state_here()
        # In a worker it goes through a pipe, which copies it, at every batch.
        return state if get_worker_info() else copy.deepcopy(state)

    def state_here(self) -> State:
        """Return where this process's own iteration stands, whoever else iterates; not a copy."""
        if self._delivered is not None:
            return self._delivered
        info = get_worker_info()
        place = self.place(info.id, info.num_workers) if info else self.place(0, 1)
        return self.next_state(place)

    def next_state(self, place: PartPlace) -> State:
        """Return where the next iteration of a worker begins."""
        return self._unused_start or self.state_at_start(self._ledger.next_epoch, place)

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next iteration.

        Raises:
            ResumeError: If it is of another rank, worker, world or dataset; the difference is
                named.
        """
        info = get_worker_info()
        place = self.place(info.id, info.num_workers) if info else self.place(0, 1)
        check_state(state, self.fingerprint, place)
        self._start, self._delivered = copy.deepcopy(state), None
        self._is_start_own = info is not None
        self._ledger.set_epoch(int(state["epoch"]))


class PackedIterableDataset(FlowDataset):
    """Iterables of samples, mixed and packed on the fly.

    Args:
        streams: The sources and their weights; without any, all count the same.
        packing: How samples share packs.
        mixing: How many of each stream, in which batches, and where an epoch ends.
        order: With shuffle, sources with an index (lists, map-style datasets) are shuffled by the
            seed; None: samples come as they are stored. Others come as they come.
        buffers: How much may be resident at once.
        batch_size: Packs in a device batch.
        batch_format: What batches look like: "native", or a trainer's format by name, such as
            "hf", or a function of the native batch; see `streampack.formats`.
        world: This process among the others; None: as torch.distributed, if it is initialised, or
            torchrun's variables say.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: a sample is not what it should be, a source fails or is empty,
            or one that can be iterated only once, such as a generator, is asked for a second epoch.

    Batches are those of `PackedStreamingDataset`, and the streams' extra fields; `position` counts
    the packs of all ranks and workers as if they kept step. Iterate it with `PackedDataLoader`,
    torchdata's ``StatefulDataLoader`` or torch's ``DataLoader(dataset, batch_size=None)``.

    Ranks may take unequal numbers of steps in an epoch: each packs its own samples, and nobody
    knows beforehand how many packs these fill. Where ranks wait for each other at every step (DDP,
    FSDP), end the epoch at a number of steps that all reach, or stop together once one rank is at
    its end.

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
            streams, packing, mixing or Mixing(), order, batch_size=check_batch_size(batch_size)
        )
        super().__init__(plan, buffers, world, check_format(batch_format, packing))


def flow_plan(
    streams: Sequence[IterableStream],
    packing: Packing,
    mixing: Mixing,
    order: Order | None,
    *,
    batch_size: int,
    bucketing: Bucketing | None = None,
) -> FlowPlan:
    """Return what decides the batches; without an order, samples come as they are stored."""
    is_shuffled, order = order is not None and order.shuffle, order or Order()
    names = unique_names(
        [stream.name or f"stream-{number}" for number, stream in enumerate(streams)]
    )
    return FlowPlan(
        # Under the names that messages and reports share.
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
    """Refuse what the buffered way cannot do.

    Raises:
        ConfigError: Naming what it can, and which dataset can do more.
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
    """Refuse extra fields that cannot share a batch, or a packer.

    Raises:
        ConfigError: Naming them.
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
