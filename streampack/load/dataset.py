"""`PackedStreamingDataset`: weighted MDS streams in, device batches of full packs out.

::

    PackedStreamingDataset --plan--> DevicePlan (integers) --read, assemble--> batch (tensors)
           |                                                        ^
           '-- PackedDataLoader: plans here, reads in threads or workers
           '-- torch's DataLoader(dataset, batch_size=None): every worker plans and reads its share

Both ways give the same batches. The constructor reads index.json of each stream and checks
everything that can be checked; planning starts at the first batch.

Cost: see `plan` and `read`. Memory: the packers' buffers (integers), one batch, mapped shards, and
for each stream of each lane that this process plans a shuffle block: 16 bytes a sample, at most
262,144 of them by default, which is 4 MiB.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from streampack.assemble import (
    Batch,
    BatchFormat,
    Blocks,
    check_format,
)
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.load.arguments import (
    check_batch_size,
    check_configs,
    check_epoch,
    show_dataset,
    with_hints,
)
from streampack.load.buffers import Footprint, batches_ahead
from streampack.load.build import Blueprint, build_recipe
from streampack.load.ending import ended_at_exit
from streampack.load.fetching import CacheNeeds, ReadAhead, cache_needs, make_fetcher
from streampack.load.ledger import EpochLedger
from streampack.load.parcel import ParcelReader, parcel
from streampack.load.reader import BatchReader
from streampack.load.sources import resolve_streams
from streampack.plan import (
    DeviceView,
    EpochSequence,
    Progress,
    Recipe,
    check_resized,
    count_packs,
    nearest_divisors,
    pack_state,
    run_shape,
    saving_worker,
    slots_in,
    unpack_state,
)
from streampack.read import Gatherer, ShardFetcher
from streampack.streams import open_streams
from streampack.types import State
from streampack.world import World

__all__ = ["PackedStreamingDataset"]


class PackedStreamingDataset(IterableDataset[Batch]):
    """Streams of tokenized samples, mixed and packed on the fly, resumed exactly.

    Args:
        streams: The streams and their weights: `Stream` or `streaming.Stream` objects.
        remote: Instead of `streams`: where a single stream's shards come from.
        local: Instead of `streams`: where a single stream's shards lie or are kept.
        split: With `remote` or `local`: a subfolder of both.
        stream_name: Instead of `streams`: a class in MosaicML's `streams_registry`, to make the
            single stream of; "streampack" is `Stream`, "stream" MosaicML's own. None: `Stream`.
        stream_config: More arguments of the single stream.
        packing: How samples share packs.
        mixing: How many of each stream, and in which batches.
        order: Which sample comes next.
        buffers: How much may be resident at once.
        batch_size: Packs in a device batch.
        batch_format: What batches look like: "native", or a trainer's format by name, such as
            "hf", or a function of the native batch; see `streampack.formats`.
        world: This process among the others; None: as torch.distributed, if it is initialised, or
            torchrun's variables say.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: If a stream's index is not what it should be.

    One epoch an iteration; the next iteration is the next epoch. Each batch is a dict of tensors, B
    packs of S tokens: see the README. Iterate it with `PackedDataLoader`, or with torch's
    ``DataLoader(dataset, batch_size=None, num_workers=n)``.
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - the public face; four of them are configs
        self,
        streams: Sequence[Any] | None = None,
        *,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        stream_name: str | None = None,
        stream_config: Mapping[str, Any] | None = None,
        packing: Packing,
        mixing: Mixing | None = None,
        order: Order | None = None,
        buffers: Buffers | None = None,
        batch_size: int = 1,
        batch_format: BatchFormat = "native",
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_configs(packing=packing, mixing=mixing, order=order, buffers=buffers, world=world)
        batch_size = check_batch_size(batch_size)
        self._convert = check_format(batch_format, packing)
        place = {"remote": remote, "local": local, "split": split}
        streams = resolve_streams(streams, place, stream_name, stream_config)
        self.buffers = buffers or Buffers()
        self._blueprint = Blueprint(
            streams=open_streams(streams, cache_limit=self.buffers.cache_bytes),
            packing=packing,
            mixing=mixing or Mixing(),
            order=order or Order(),
            batch_size=batch_size,
            world=world or World.from_env(os.environ),
            cache_limit=self.buffers.cache_bytes,
            keeps_packed=tuple(bool(getattr(stream, "keep_zip", False)) for stream in streams),
        )
        self._finds_world = world is None
        self._recipe = build_recipe(self._blueprint)
        self._cache_needs: tuple[Recipe, CacheNeeds] | None = None
        self._ledger = EpochLedger()
        self._start = Progress()
        self._saved_size = self._recipe.global_batch_size  # of the state that was loaded last
        self._delivered: Progress | None = None
        self._worker_start: Progress | None = None
        self._totals: dict[int, int] = {}
        self._latest: EpochSequence | None = None
        self._num_iterations = 0
        self._under_way: EpochSequence | None = None  # whose batches tell where this stands
        self._next_epoch = 0  # when this process began to iterate, if it did
        batches_ahead(self.buffers, self.footprint(), 1)
        self.fetcher()

    # What it is.

    @property
    def recipe(self) -> Recipe:
        """All that the sequence of packs is a function of."""
        return self._recipe

    @property
    def stream_names(self) -> list[str]:
        """The streams' names; `segments[:, 1]` counts in this order."""
        return self._recipe.names

    @property
    def world(self) -> World:
        """This process among the others."""
        return self._blueprint.world

    @property
    def batch_size(self) -> int:
        """Packs in a device batch."""
        return self._blueprint.batch_size

    @property
    def fetched_for_lengths(self) -> list[int]:
        """Bytes of each shard that this process brought to learn its lengths, so far."""
        return self._blueprint.fetched_for_lengths

    @property
    def _digests(self) -> list[str]:
        return [stream.digest for stream in self._blueprint.streams]

    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch: the one under way, or the next.

        Under torch's own workers this process does not see which is under way: it is the next.
        """
        return self.num_batches(
            self._delivered.epoch if self._delivered else self._ledger.next_epoch
        )

    def num_batches(self, epoch: int) -> int:
        """Return the batches of this rank in a whole epoch."""
        return -(-self._slots_in(epoch) // self._window)

    @property
    def _window(self) -> int:
        """Packs that all ranks take in one step."""
        return self.batch_size * self.world.num_devices

    def _slots_in(self, epoch: int) -> int:
        """Return the slots of an epoch over all ranks, the padding of its last batch included."""
        recipe = self._recipe
        if recipe.mixing.epoch_end == "carry":
            return recipe.packs_per_carry_epoch
        if epoch not in self._totals:
            lanes = range(recipe.num_lanes)
            self._totals[epoch] = sum(sum(count_packs(recipe, epoch, lane)) for lane in lanes)
        return slots_in(recipe, self._totals[epoch])

    def _check_world(self) -> None:
        if self._finds_world:
            self.world.check_group()

    def __repr__(self) -> str:
        size = f"max_seq_len={self._recipe.packing.max_seq_len}"
        return show_dataset(self, self.stream_names, size, self.batch_size, self.world)

    def __getstate__(self) -> dict[str, Any]:
        self._check_world()  # a worker that is spawned cannot see what the training process joined
        # A copy in a worker plans for itself.
        return self.__dict__ | {"_latest": None, "_under_way": None}

    def footprint(self, num_workers: int = 0, *, plans_in_workers: bool = False) -> Footprint:
        """Return what a rank holds at most, for the bounds of `Buffers`."""
        recipe, lanes = self._recipe, self._recipe.num_lanes
        if recipe.mixing.epoch_end == "carry" and recipe.lane_run == self.batch_size:
            # With other ends a device comes to every lane, at the latest where some are dry.
            lanes //= math.gcd(lanes, self.world.num_devices)
        return Footprint(
            packer_tokens=lanes * recipe.num_columns * recipe.packing.buffer_limit,
            batch_tokens=self.batch_size * recipe.packing.max_seq_len,
            num_workers=num_workers,
            plans_in_workers=plans_in_workers,
        )

    # Iterating.

    def reader(self, *, pinned: bool = False) -> BatchReader:
        """Return what turns this dataset's plans into batches, in pinned memory or not."""
        packing = self._recipe.packing
        return BatchReader(
            gatherer=Gatherer(self._blueprint.streams, packing),
            packing=packing,
            convert=self._convert,
            blocks=Blocks(pinned=pinned),
        )

    def fetcher(self, num_workers: int = 0, planner: int | None = None) -> ShardFetcher | None:
        """Return what fetches ahead in a process that plans; None where nothing is to be fetched.

        Args:
            num_workers: Worker processes of this rank.
            planner: Where each worker plans for itself, which one this is.

        Raises:
            ConfigError: If the cache limit cannot hold what this node reads at once.
        """
        if self._cache_needs is None or self._cache_needs[0] is not self._recipe:
            self._cache_needs = (self._recipe, cache_needs(self._blueprint, self._recipe))
        return make_fetcher(
            self._blueprint,
            self._cache_needs[1],
            num_workers=num_workers,
            planner=planner,
        )

    def begin(self, worker: int = 0, key: str | None = None) -> EpochSequence:
        """Begin the next epoch, or go on where a loaded state says, and return its sequence.

        Args:
            worker: Which of the processes that iterate together this is.
            key: The same in all of them.

        Raises:
            ConfigError: If torch.distributed says by now that this is another rank.
        """
        self._check_world()
        key = key or f"{os.getpid()}:{id(self)}:{self._num_iterations}"
        self._num_iterations += 1
        self._delivered = self._under_way = None
        self._take_over_run()
        start, self._worker_start = self._worker_start, None
        if start is not None:
            self._ledger.begin(worker, key, start.epoch)
            return self._sequence(start)
        epoch = self._ledger.begin(worker, key)
        if epoch != self._start.epoch or not self._start.position:
            start = self._start if epoch == self._start.epoch else Progress(epoch=epoch)
            self._check_not_empty(start)
            return self._sequence(start)
        sequence = self._sequence(self._start)
        slots, size = sequence.num_slots, self._saved_size
        # A state of larger global batches may stand after padding that the last one here lacks.
        if slots is not None and self._start.position > -(-slots // size) * size:
            raise ResumeError(
                f"the state's position {self._start.position} lies after the epoch's {slots} "
                "packs; load what state_dict() or state_after(batch) returned, unchanged"
            )
        if sequence.is_finished:
            # The state was taken after the epoch's last batch: what follows is the next epoch.
            self._ledger.begin(worker, key, epoch + 1)
            return self._sequence(Progress(epoch=epoch + 1))
        if sequence.position % self.batch_size:
            raise ResumeError(
                f"the state's position {self._start.position} is no multiple of batch_size="
                f"{self.batch_size}; set batch_size to "
                f"{nearest_divisors(self._start.position, self.batch_size)}, on any number of ranks"
            )
        return sequence

    def _check_not_empty(self, start: Progress) -> None:
        """Refuse epochs that end before their first batch, which a training loop would spin on."""
        recipe = self._recipe
        drops_batch = recipe.mixing.epoch_end == "drop"
        drops_samples = recipe.packing.overflow == "drop" and recipe.mixing.epoch_end == "pad"
        if not (drops_batch or drops_samples):
            return
        # One of its own: the stats count what is dropped from where they see a sequence first.
        sequence = self._sequence(start)
        is_empty = sequence.is_finished
        sequence.close()
        if is_empty and not drops_batch:
            raise DataError(
                f"epoch {start.epoch}: all of its samples are longer than max_seq_len="
                f"{recipe.packing.max_seq_len}, and overflow='drop' leaves nothing; raise "
                "max_seq_len, or set overflow to split or truncate"
            )
        if is_empty:
            raise ConfigError(
                "epoch_end='drop' leaves no batch: an epoch has fewer packs than one global batch, "
                f"global_batch_size={self._recipe.global_batch_size}; lower it, raise epoch_size, "
                "or set epoch_end='pad'"
            )

    def _sequence(self, start: Progress) -> EpochSequence:
        world = self.world
        view = DeviceView(
            place=world.place, num_devices=world.num_devices, batch_size=self.batch_size
        )
        snapshots = start.snapshots
        latest = self._latest if self._recipe.mixing.epoch_end == "carry" else None
        if latest and (latest.epoch, latest.position) <= (start.epoch, start.position):
            # Lanes roll on from epoch to epoch: go on from where the last one left them.
            snapshots = snapshots or latest.snapshots()
        self._latest = EpochSequence(
            self._recipe,
            view,
            epoch=start.epoch,
            position=start.position,
            snapshots=snapshots,
        )
        return self._latest

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch; in a torch worker, this worker's share of it."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        footprint = self.footprint(num_workers if info else 0, plans_in_workers=info is not None)
        batches_ahead(self.buffers, footprint, 1)
        key = None
        if info is not None:
            # Workers of one iteration share the loader's base seed; a persistent worker that is
            # resumed keeps it, so how often it was resumed belongs to the key.
            key = f"{info.seed - info.id}:{num_workers}:{self._num_iterations}"
        sequence = self.begin(worker, key)
        # At once, not at the first batch: a worker may be asked for its state before that.
        self._under_way = sequence
        self._note(sequence, Progress(epoch=sequence.epoch, position=sequence.position))
        self._next_epoch = self._ledger.next_epoch
        in_worker = info is not None
        return ended_at_exit(self._batches(sequence, worker, num_workers, in_worker=in_worker))

    def _batches(
        self, sequence: EpochSequence, worker: int, num_workers: int, *, in_worker: bool
    ) -> Generator[Batch, None, None]:
        read = ParcelReader(reader=self.reader()) if in_worker else self.reader()
        fetcher = self.fetcher(num_workers if in_worker else 0, worker if in_worker else None)
        ahead = ReadAhead(fetcher, sequence)
        step = 0
        epoch, base = sequence.epoch, sequence.position
        try:
            ahead.look()
            while (plan := sequence.next(fetch=step % num_workers == worker)) is not None:
                step += 1
                finished = ahead.look()
                if (step - 1) % num_workers == worker:
                    # In a worker: all rounds up to and with this one are done, as far as it knows.
                    rounds = -(-step // num_workers) * num_workers
                    position = base + rounds * self._window if in_worker else plan.position
                    ahead.need_for(plan)
                    batch = parcel(read(plan))
                    self._note(sequence, Progress(epoch=epoch, position=position))
                    yield batch
                    del batch
                ahead.finish(finished)
        finally:
            ahead.close()
            sequence.close()
        if not in_worker:
            self._note(sequence, Progress(epoch=epoch + 1))

    def _note(self, sequence: EpochSequence, progress: Progress) -> None:
        """Note where this stands, but for an iteration that came before another, or a state."""
        if sequence is self._under_way:
            self._delivered = progress

    # Where it stands.

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one, from its start.

        Raises:
            ConfigError: If it is no integer of at least 0, or more than a state can hold.
        """
        self._go_to(Progress(epoch=check_epoch(epoch)))

    def state_dict(self) -> State:
        """Return where this process stands, as JSON.

        Raises:
            ResumeError: If this process cannot know, because workers of another loader iterate.
        """
        info = get_worker_info()
        elsewhere = self._delivered is None or self._ledger.next_epoch != self._next_epoch
        if info is None and elsewhere and self._ledger.has_begun:
            raise ResumeError(
                "batches were delivered by a loader, so the dataset cannot know its position; "
                "use dataset.state_after(batch) with the last batch, or loader.state_dict()"
            )
        progress = self._delivered or self._worker_start
        if progress is None:
            progress = self.next_start
        state = pack_state(self._recipe, self._digests, progress)
        if info is not None:
            state |= {"worker": [info.id, info.num_workers], "window": self._window}
        return state

    @property
    def next_start(self) -> Progress:
        """Where the next iteration begins."""
        epoch = self._ledger.next_epoch
        return self._start if epoch == self._start.epoch else Progress(epoch=epoch)

    def state_after(self, batch: Mapping[str, Any]) -> State:
        """Return the state of a run that has trained on `batch`, whichever loader delivered it."""
        keys = set(batch) if isinstance(batch, Mapping) else set()
        missing = {"epoch", "position"} - keys
        if missing:
            raise ResumeError(
                f"the batch has no {' and no '.join(sorted(missing))}; pass a batch as delivered, "
                "or where its batch_format has no place for them, use loader.state_dict()"
            )
        progress = Progress(epoch=int(batch["epoch"]), position=int(batch["position"]))
        return pack_state(self._recipe, self._digests, progress)

    def state_at(self, progress: Progress) -> State:
        """Return the state of a run that has come this far."""
        return pack_state(self._recipe, self._digests, progress)

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next iteration; worlds, workers and batch_size may differ.

        So may global_batch_size, where the packs stay the same.
        A state that a worker of another loader saved, as torchdata's StatefulDataLoader asks for,
        fits that worker of as many, and steps of as many packs over all ranks.

        Raises:
            ResumeError: If the state belongs to another sequence; the difference is named.
        """
        shape = run_shape(state)
        self._check_lanes(shape[0])
        size = self._blueprint.mixing.global_batch_size or shape[2]
        try:
            saved = build_recipe(self._blueprint, shape)
            is_same = size == shape[2]
            recipe = saved if is_same else build_recipe(self._blueprint, (*shape[:2], size))
        except ConfigError as error:
            raise ResumeError(f"the state does not fit this dataset: {error}") from error
        progress = unpack_state(state, saved, self._digests)
        check_resized(saved, recipe, progress)
        info, saved_in = get_worker_info(), saving_worker(state)
        if saved_in is not None and (info is None or saved_in != [info.id, info.num_workers]):
            here = f"worker {info.id} of {info.num_workers}" if info else "the training process"
            raise ResumeError(
                f"the state was saved in worker {saved_in[0]} of {saved_in[1]}, but is loaded in "
                f"{here}; load it with as many workers, or save dataset.state_after(batch), which "
                "fits any number"
            )
        if saved_in is not None and state.get("window") != self._window:
            # Its workers stand at different steps, which only steps of the same size go on from.
            raise ResumeError(
                f"the state was saved in a worker while a step of all ranks took "
                f"{state.get('window')!r:.80} packs, but batch_size={self.batch_size} and "
                f"{self.world.num_devices} ranks with batches of their own take {self._window}; "
                "load it with as many, or save dataset.state_after(batch), which fits any number"
            )
        self._recipe, self._saved_size = recipe, shape[2]
        self._totals = {}
        self._latest = None
        if saved_in is not None:
            self._worker_start, self._delivered, self._under_way = progress, None, None
        else:
            self._go_to(progress)

    def _check_lanes(self, saved: int) -> None:
        own = self._blueprint.order.num_lanes
        if own is not None and own != saved:
            raise ResumeError(
                f"the state was saved with num_lanes={saved}, but this dataset asks for {own}; "
                f"a run keeps its num_lanes: set {saved}, or leave it out"
            )

    def _go_to(self, progress: Progress) -> None:
        self._start = progress
        self._delivered = self._under_way = None
        self._ledger.set_epoch(progress.epoch)
        shape = (
            self._recipe.num_lanes,
            self._recipe.lane_run,
            self._recipe.global_batch_size,
        )
        self._ledger.run = [1, progress.epoch, progress.position, *shape]

    def _take_over_run(self) -> None:
        """Learn what the training process loaded after this (persistent) worker had started."""
        is_set, epoch, position, *shape = self._ledger.run
        if not is_set:
            return
        recipe = self._recipe
        if tuple(shape) != (recipe.num_lanes, recipe.lane_run, recipe.global_batch_size):
            self._recipe = build_recipe(self._blueprint, (shape[0], shape[1], shape[2]))
            self._totals, self._latest = {}, None
        if (epoch, position) != (self._start.epoch, self._start.position):
            self._start = Progress(epoch=epoch, position=position)
