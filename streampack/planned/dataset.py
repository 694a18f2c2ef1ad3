"""`PackedStreamingDataset`: weighted MDS streams in, device batches of full packs out.

::

    PackedStreamingDataset --plan--> DevicePlan (integers) --gather, batch--> batch (tensors)
           |                                                        ^
           '-- PackedDataLoader: plans here, reads in threads or workers
           '-- torch's DataLoader(dataset, batch_size=None): every worker plans and reads its share

Both give the same batches. The constructor reads index.json of each stream and checks everything
that can be checked. Planning starts at the first batch.

Cost: see `plan` and `gather`. Memory: the packers' buffers (integers), one batch, mapped shards,
and a shuffle block for each stream of each lane that this process plans. A block takes 16 bytes per
sample and has at most 262,144 samples by default, which is 4 MiB.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from streampack.batch.batch import Batch
from streampack.batch.buffer_pool import BufferPool
from streampack.batch.formats.registry import BatchFormat, check_format
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.gather.gather import Gatherer
from streampack.gather.shard_prefetch import ShardPrefetcher
from streampack.plan import (
    DeviceView,
    EpochSequence,
    Progress,
    Recipe,
    check_resized,
    count_packs,
    fingerprint,
    nearest_divisors,
    pack_state,
    run_shape,
    saving_worker,
    slots_in,
    unpack_state,
)
from streampack.planned.build import DatasetSpec, build_recipe
from streampack.planned.cache_budget import CacheWorkingSet, ReadAhead, cache_needs, make_fetcher
from streampack.runtime.arguments import (
    check_batch_size,
    check_configs,
    check_epoch,
    show_dataset,
    with_hints,
)
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.batch_reader import BatchReader
from streampack.runtime.epoch_counter import SharedEpochCounter
from streampack.runtime.memory_budget import MemoryFootprint, max_prefetch
from streampack.runtime.rank_digest import RankView, digest_of
from streampack.runtime.torch_transfer import ParcelReader, parcel
from streampack.streams import open_streams
from streampack.streams.registry import resolve_streams
from streampack.types import State
from streampack.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Before:
    """The dataset's state before an iteration began, so that `abandon` can restore it."""

    worker: int
    word: int
    """The worker's entry in the epoch counter."""
    at: Progress | None
    under_way: EpochSequence | None
    next_epoch: int
    latest: EpochSequence | None
    worker_start: Progress | None


class PackedStreamingDataset(IterableDataset[Batch]):
    """Streams of tokenized samples, mixed and packed on the fly, resumed exactly.

    Args:
        streams: The streams and their weights: `Stream` or `streaming.Stream` objects.
        remote: Remote location of a single stream, instead of `streams`.
        local: Local or cache folder of a single stream, instead of `streams`.
        split: Subfolder of `remote` and `local`.
        stream_name: Class of the single stream, a name in MosaicML's `streams_registry`:
            "streampack" is `Stream`, "stream" is MosaicML's own. None: `Stream`.
        stream_config: Further arguments of the single stream.
        packing: How samples share packs.
        mixing: The share of each stream, and how batches mix them.
        order: The order of samples.
        buffers: Memory limits.
        batch_size: Packs in a device batch.
        batch_format: "native", a trainer's format by name such as "hf", or a function of the
            native batch; see `streampack.formats`.
        world: Rank and number of ranks; None: from torch.distributed, if it is initialised, or
            from torchrun's variables.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: If a stream's index is invalid.

    Each iteration is one epoch, and the next iteration is the next epoch. Each batch is a dict of
    tensors, B packs of S tokens: see the README. Iterate with `PackedDataLoader`, or with torch's
    ``DataLoader(dataset, batch_size=None, num_workers=n)``.
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - the public constructor; four arguments are configs
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
        batch_size = check_batch_size(batch_size, packing.max_seq_len)
        self._convert = check_format(batch_format, packing, batch_size)
        place = {"remote": remote, "local": local, "split": split}
        streams = resolve_streams(streams, place, stream_name, stream_config)
        self.streams = list(streams)
        """The streams as passed, without derived weights."""
        self.buffers = buffers or Buffers()
        self._blueprint = DatasetSpec(
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
        self._digests = [stream.full_digest for stream in self._blueprint.streams]
        self._recipe = build_recipe(self._blueprint)
        self._cache_needs: tuple[Recipe, CacheWorkingSet] | None = None
        self._ledger = SharedEpochCounter()
        self._start = Progress()
        self._saved_size = self._recipe.global_batch_size  # of the state loaded last
        # The current position; None: the start of the next iteration.
        self._at: Progress | None = None
        self._worker_start: Progress | None = None
        self._totals: dict[int, int] = {}
        self._latest: EpochSequence | None = None
        self._num_iterations = 0
        self._under_way: EpochSequence | None = None  # the iteration that determines the state
        self._next_epoch = 0  # next epoch when this process began to iterate, if it did
        self._before: _Before | None = None  # set until the iteration's first batch
        max_prefetch(self.buffers, self.footprint(), 1)
        self.fetcher()

    # Properties.

    @property
    def recipe(self) -> Recipe:
        """Everything that determines the sequence of packs."""
        return self._recipe

    @property
    def stream_names(self) -> list[str]:
        """The streams' names, indexed by `segments[:, 1]`."""
        return self._recipe.names

    @property
    def world(self) -> World:
        """This process's rank and the number of ranks."""
        return self._blueprint.world

    @property
    def batch_size(self) -> int:
        return self._blueprint.batch_size

    @property
    def fetched_for_lengths(self) -> list[int]:
        """Bytes of each shard that this process fetched to learn its lengths, so far."""
        return self._blueprint.fetched_for_lengths

    @property
    def digest(self) -> str:
        """Digest of everything that determines the packs: index files, columns, lengths and recipe.

        A stream's lengths are part of it only if a length file states them. `loader.stats()`, the
        log at INFO and ``streampack simulate`` report it. It can be derived from a state's
        `fingerprint`. Ranks, batch_size and paths are not part of it.
        """
        return digest_of(self._decided())

    def _decided(self) -> dict[str, Any]:
        recipe = self._recipe
        shape = ("num_lanes", "lane_run", "global_batch_size")
        return fingerprint(recipe, self._digests) | {key: getattr(recipe, key) for key in shape}

    def rank_view(self) -> RankView:
        """Return this rank's inputs to planning, to be compared across ranks."""
        streams = []
        for name, stream, text in zip(
            self.stream_names, self._blueprint.streams, self._digests, strict=True
        ):
            index, _, lengths = text.partition(":")
            folder = str(stream.cache.folder)
            streams.append({"name": name, "folder": folder, "index": index, "lengths": lengths})
        recipe = {key: value for key, value in self._decided().items() if key != "streams"}
        world = self.world
        recipe |= {"batch_size": self.batch_size, "replication": world.replication}
        return {"streams": streams, "recipe": recipe | {"nodes": world.num_nodes}}

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next.

        Under torch's own workers, this process does not see the current epoch: it is the next.
        """
        return self.num_batches(self._at.epoch if self._at else self._ledger.next_epoch)

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return -(-self._slots_in(epoch) // self._window)

    @property
    def _window(self) -> int:
        """Packs consumed by all ranks in one step."""
        return self.batch_size * self.world.num_devices

    def _slots_in(self, epoch: int) -> int:
        """Return the slots of an epoch over all ranks, including the padding of its last batch."""
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
        self._check_world()  # a spawned worker cannot see the process group
        # A copy in a worker plans for itself.
        # A downloader may hold a client, which cannot be pickled.
        streams = [copy.copy(stream) for stream in self.streams]
        for stream in streams:
            stream._downloader = None
        kept = {"_latest": None, "_under_way": None, "_before": None, "streams": streams}
        return self.__dict__ | kept

    def footprint(self, num_workers: int = 0, *, plans_in_workers: bool = False) -> MemoryFootprint:
        """Return the peak memory of a rank, to check against `Buffers`."""
        recipe, lanes = self._recipe, self._recipe.num_lanes
        if recipe.mixing.epoch_end == "carry" and recipe.lane_run == self.batch_size:
            # With other values of epoch_end, a device reads every lane in the end.
            lanes //= math.gcd(lanes, self.world.num_devices)
        return MemoryFootprint(
            packer_tokens=lanes * recipe.num_columns * recipe.packing.buffer_limit,
            batch_tokens=self.batch_size * recipe.packing.max_seq_len,
            num_workers=num_workers,
            plans_in_workers=plans_in_workers,
        )

    # Iteration.

    def reader(self, *, pinned: bool = False) -> BatchReader:
        """Return a reader that turns this dataset's plans into batches."""
        packing = self._recipe.packing
        return BatchReader(
            gatherer=Gatherer(self._blueprint.streams, packing),
            packing=packing,
            convert=self._convert,
            blocks=BufferPool(pinned=pinned),
        )

    def fetcher(self, num_workers: int = 0, planner: int | None = None) -> ShardPrefetcher | None:
        """Return the shard prefetcher of a planning process; None if there is nothing to fetch.

        Args:
            num_workers: Worker processes of this rank.
            planner: Index of this worker, if each worker plans for itself.

        Raises:
            ConfigError: If the cache limit cannot hold this node's concurrent shards.
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
        """Begin the next epoch, or resume from a loaded state, and return the sequence.

        Until the first batch is noted, `abandon` restores everything as it was before.

        Args:
            worker: Index of this process among those that iterate together.
            key: Identifies the iteration; the same in all of those processes.

        Raises:
            ConfigError: If torch.distributed now reports another rank than at construction.
        """
        self._check_world()
        key = key or f"{os.getpid()}:{id(self)}:{self._num_iterations}"
        self._num_iterations += 1
        self._before = _Before(
            worker=worker,
            word=self._ledger.word(worker),
            at=self._at,
            under_way=self._under_way,
            next_epoch=self._next_epoch,
            latest=self._latest,
            worker_start=self._worker_start,
        )
        try:
            sequence = self._begin(worker, key)
        except BaseException:
            self.abandon()
            raise
        self._under_way = sequence
        self._at = Progress(epoch=sequence.epoch, position=sequence.position)
        self._next_epoch = self._ledger.next_epoch
        return sequence

    def _begin(self, worker: int, key: str) -> EpochSequence:
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
        # With larger global batches, a state may lie after padding that the last batch lacks here.
        if slots is not None and self._start.position > -(-slots // size) * size:
            raise ResumeError(
                f"the state's position {self._start.position} lies after the epoch's {slots} "
                "packs; load what state_dict() or state_after(batch) returned, unchanged"
            )
        if sequence.is_finished:
            # The state was taken after the epoch's last batch, so the next epoch follows.
            self._ledger.begin(worker, key, epoch + 1)
            return self._sequence(Progress(epoch=epoch + 1))
        if sequence.position % self.batch_size:
            raise ResumeError(
                f"the state's position {self._start.position} is no multiple of batch_size="
                f"{self.batch_size}; set batch_size to "
                f"{nearest_divisors(self._start.position, self.batch_size)}, on any number of ranks"
            )
        return sequence

    def ask(self) -> None:
        """Note that an iterator was requested; until its first batch, the state is its start.

        This claims no epoch: some trainers call iter() only as a check and discard the iterator.
        """
        self._at = None

    def note(self, sequence: EpochSequence, progress: Progress | None) -> None:
        """Note the progress of an iteration; None: it is finished.

        Ignored if a later iteration has begun or a state was loaded since.
        """
        self._before = None
        if sequence is not self._under_way:
            return
        if progress is None:
            progress = Progress(epoch=sequence.epoch + 1)
            progress = replace(progress, snapshots=self._snapshots_at(progress))
        self._at = progress

    def is_told_by(self, sequence: EpochSequence) -> bool:
        """Return whether this iteration still determines the state."""
        return sequence is self._under_way

    def abandon(self) -> None:
        """Note that an iteration failed; undo it if it had no batch yet."""
        before, self._before = self._before, None
        self._latest = None  # planning may have stopped halfway
        if before is None:
            return
        self._ledger.put_back(before.worker, before.word)
        self._at, self._next_epoch = before.at, before.next_epoch
        self._under_way, self._latest = before.under_way, before.latest
        self._worker_start = before.worker_start

    def _check_not_empty(self, start: Progress) -> None:
        """Refuse epochs without a single batch, on which a training loop would spin."""
        recipe = self._recipe
        drops_batch = recipe.mixing.epoch_end == "drop"
        drops_samples = recipe.packing.overflow == "drop" and recipe.mixing.epoch_end == "pad"
        if not (drops_batch or drops_samples):
            return
        # Use a throwaway sequence: stats count drops from the first sequence that they see.
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
        self._latest = EpochSequence(
            self._recipe,
            view,
            epoch=start.epoch,
            position=start.position,
            snapshots=self._snapshots_at(start),
        )
        return self._latest

    def _snapshots_at(self, start: Progress) -> list[State]:
        """Return snapshots from which planning can resume, as far as they are known."""
        latest = self._latest if self._recipe.mixing.epoch_end == "carry" else None
        if latest and (latest.epoch, latest.position) <= (start.epoch, start.position):
            # Lanes continue across epochs: start from where the last epoch left them.
            return start.snapshots or latest.snapshots()
        return start.snapshots

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch at the first batch; in a torch worker, this worker's share of it."""
        info = get_worker_info()
        num_workers = info.num_workers if info else 0
        footprint = self.footprint(num_workers, plans_in_workers=info is not None)
        max_prefetch(self.buffers, footprint, 1)
        if info is None:
            self._check_world()
            self.ask()
            return close_at_exit(self._batches(None, 0, 0))
        # Workers of one iteration share the loader's base seed. A resumed persistent worker keeps
        # its seed, so the key also counts iterations.
        key = f"{info.seed - info.id}:{num_workers}:{self._num_iterations}"
        # Begin immediately: a worker may be asked for its state before its first batch.
        return close_at_exit(self._batches(self.begin(info.id, key), info.id, num_workers))

    def _batches(
        self, begun: EpochSequence | None, worker: int, num_workers: int
    ) -> Generator[Batch, None, None]:
        sequence = begun or self.begin()
        read = ParcelReader(reader=self.reader()) if num_workers else self.reader()
        fetcher = self.fetcher(num_workers, worker if num_workers else None)
        ahead = ReadAhead(fetcher, sequence)
        step, turns = 0, max(num_workers, 1)
        epoch, base = sequence.epoch, sequence.position
        try:
            ahead.look()
            while (plan := sequence.next(fetch=step % turns == worker)) is not None:
                step += 1
                finished = ahead.look()
                if (step - 1) % turns == worker:
                    # A worker knows only its own progress: assume that this round is complete.
                    rounds = -(-step // turns) * turns
                    position = base + rounds * self._window if num_workers else plan.position
                    ahead.need_for(plan)
                    batch = parcel(read(plan))
                    self.note(sequence, Progress(epoch=epoch, position=position))
                    yield batch
                    del batch
                ahead.finish(finished)
        except GeneratorExit:
            raise
        except BaseException:
            self.abandon()
            raise
        finally:
            ahead.close()
            sequence.close()
        if not num_workers:
            self.note(sequence, None)

    # State.

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next loop, from its start.

        This replaces a loaded state and any progress so far: until that loop, the state is the
        start of `epoch`. A running loop continues to its end, but no longer affects the state.
        Later loops count up from `epoch`.

        Raises:
            ConfigError: If it is not an integer of at least 0, or is too large for a state.
        """
        self._go_to(Progress(epoch=check_epoch(epoch)))

    def state_dict(self) -> State:
        """Return the state of this process, as JSON.

        Raises:
            ResumeError: If workers of another loader iterate, so the state is unknown here.
        """
        info = get_worker_info()
        elsewhere = self._ledger.has_begun and self._ledger.next_epoch != self._next_epoch
        if info is None and elsewhere:
            raise ResumeError(
                "batches were delivered by a loader, so the dataset cannot know its position; "
                "use dataset.state_after(batch) with the last batch, or loader.state_dict()"
            )
        state = self.state_here()
        if info is not None:
            state |= {"worker": [info.id, info.num_workers], "window": self._window}
        return state

    def state_here(self) -> State:
        """Return the state of this process's own iterations, ignoring other processes."""
        progress = self._at or self._worker_start or self.next_start
        return pack_state(self._recipe, self._digests, progress)

    @property
    def next_start(self) -> Progress:
        """Start of the next iteration."""
        epoch = self._ledger.next_epoch
        return self._start if epoch == self._start.epoch else Progress(epoch=epoch)

    def state_after(self, batch: Mapping[str, Any]) -> State:
        """Return the state of a run that has trained on `batch`, delivered by any loader."""
        keys = set(batch) if isinstance(batch, Mapping) else set()
        missing = {"epoch", "position"} - keys
        if missing:
            raise ResumeError(
                f"the batch has no {' and no '.join(sorted(missing))}; pass a batch as delivered, "
                "or where its batch_format has no place for them, use loader.state_dict()"
            )
        progress = Progress(epoch=int(batch["epoch"]), position=int(batch["position"]))
        return pack_state(self._recipe, self._digests, progress)

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next iteration; worlds, workers and batch_size may differ.

        global_batch_size may differ too, if the packs stay the same.
        A state saved in a worker of another loader, as by torchdata's StatefulDataLoader, fits only
        the same worker index, the same number of workers, and the same number of packs per step.

        Raises:
            ResumeError: If the state belongs to another sequence; the message names the difference.
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
            # Workers may be at different steps: they can only resume with the same step size.
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
            self._worker_start, self._at, self._under_way = progress, None, None
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
        self._at = self._under_way = self._before = None
        self._ledger.set_epoch(progress.epoch)
        shape = (
            self._recipe.num_lanes,
            self._recipe.lane_run,
            self._recipe.global_batch_size,
        )
        self._ledger.run = [1, progress.epoch, progress.position, *shape]

    def _take_over_run(self) -> None:
        """Adopt a state that the training process loaded since this persistent worker started."""
        is_set, epoch, position, *shape = self._ledger.run
        if not is_set:
            return
        recipe = self._recipe
        if tuple(shape) != (recipe.num_lanes, recipe.lane_run, recipe.global_batch_size):
            self._recipe = build_recipe(self._blueprint, (shape[0], shape[1], shape[2]))
            self._totals, self._latest = {}, None
        if (epoch, position) != (self._start.epoch, self._start.position):
            self._start = Progress(epoch=epoch, position=position)
