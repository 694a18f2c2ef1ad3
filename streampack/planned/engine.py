"""The engine of `PackedStreamingDataset`: epochs of plans, their readers, and states.

::

    begin --> PackSequence --plan--> BatchReader --> batch
                   |
                   '-- ShardPrefetcher follows the plan

The loader plans in its own process and reads elsewhere. Under torch's own DataLoader every worker
has a copy of the engine, plans everything and reads its share.

Cost: see `plan` and `gather`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from streampack.batch.batch import Batch
from streampack.batch.buffer_pool import BufferPool
from streampack.batch.formats.registry import Formatter
from streampack.config import Buffers
from streampack.errors import ConfigError, ResumeError
from streampack.gather.gather import Gatherer
from streampack.gather.shard_prefetch import FetchLimits, ShardPrefetcher
from streampack.plan import (
    DevicePlan,
    PackSequence,
    Progress,
    Recipe,
    RunShape,
    check_resized,
    count_slots,
    decode_state,
    encode_state,
    epoch_sequence,
    plan_fingerprint,
    run_shape,
    slots_in,
)
from streampack.plan.lane_ends import packs_in
from streampack.plan.lane_stream import skips_lanes
from streampack.planned.build import METHODS, DatasetSpec, build_recipe, kept_shape
from streampack.planned.cache_budget import (
    CacheWorkingSet,
    ReadAhead,
    cache_needs,
    fetch_limits,
    lane_cycle,
)
from streampack.planned.device_view import balance_in_state, check_balance, device_view
from streampack.planned.refusals import (
    check_at_batch,
    check_lanes,
    check_not_empty,
    check_saving_worker,
    check_whole_batches,
    check_within_epoch,
)
from streampack.runtime.at_exit import close_at_exit
from streampack.runtime.batch_reader import BatchReader
from streampack.runtime.memory_budget import MemoryFootprint, max_prefetch
from streampack.runtime.rank_digest import RankView
from streampack.runtime.resumable import ResumableRun
from streampack.runtime.whole_batch import whole
from streampack.types import State


class PlanEngine(ResumableRun[PackSequence, Progress]):
    """Plans, reads and resumes the epochs of a planned dataset."""

    ROLLED_BACK = (*ResumableRun.ROLLED_BACK, "_latest", "_worker_start")

    def __init__(
        self, spec: DatasetSpec, convert: Formatter, buffers: Buffers, *, finds_world: bool
    ) -> None:
        super().__init__(spec.world, finds_world=finds_world)
        self.buffers = buffers
        self.balance = spec.balance
        self._spec = spec
        self.fetched_for_lengths = spec.fetched_for_lengths
        """Bytes of each shard that this process fetched to learn its lengths; grows."""
        self._convert = convert
        self._digests = self._stream_digests()
        self._start = Progress()
        self._build()
        self._saved_size = self.recipe.global_batch_size  # of the state loaded last
        self._worker_start: Progress | None = None
        self.num_changes = 0
        """How often the run was changed; an iteration that began before ends there."""
        max_prefetch(buffers, self.footprint(), 1)
        self.check_cache()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_latest": None}  # a copy in a worker plans for itself

    def _stream_digests(self) -> list[str]:
        return [stream.full_digest for stream in self._spec.streams]

    def _build(self) -> None:
        """Build what determines the sequence."""
        self._use_recipe(build_recipe(self._spec))

    def _use_recipe(self, recipe: Recipe) -> None:
        self.recipe = recipe
        """Everything that determines the sequence of packs."""
        self.batch_size = self._spec.batch_size
        self.size = f"max_seq_len={self._spec.packing.max_seq_len}"
        self._view = device_view(self.world, self.batch_size, self.balance)
        self._totals: dict[int, int] = {}  # packs of epochs
        self._needs: dict[int, CacheWorkingSet] = {}  # of the epochs of a `lane_cycle`
        self._latest: PackSequence | None = None

    def fingerprint(self) -> dict[str, Any]:
        """Return the plan's fingerprint, and the shape that a run keeps."""
        recipe = self.recipe
        shape = ("num_lanes", "lane_run", "global_batch_size")
        return plan_fingerprint(recipe, self._digests) | {
            key: getattr(recipe, key) for key in shape
        }

    def rank_view(self) -> RankView:
        """Return the streams and options that every rank must share."""
        spec, world, balance = self._spec, self.world, self.balance
        streams = []
        for name, stream, digest in zip(
            self.recipe.names, spec.streams, self._digests, strict=True
        ):
            index, _, lengths = digest.partition(":")
            folder = str(stream.cache.folder)
            streams.append({"name": name, "folder": folder, "index": index, "lengths": lengths})
        recipe = {key: value for key, value in self.fingerprint().items() if key != "streams"}
        recipe |= {
            "batch_size": spec.batch_size,
            "replication": world.replication,
            "nodes": world.num_nodes,
            "context_parallel": [world.context_parallel, world.context_layout],
            "balance": None if balance is None else [balance.within, balance.digest()],
        }
        return {"streams": streams, "recipe": recipe}

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next."""
        epoch = self.at.epoch if self.at else self.counter.next_epoch
        return -(-self._slots_in(epoch) // self._view.window)

    def _slots_in(self, epoch: int) -> int:
        """Return the slots of an epoch over all ranks, including the padding of its last batch."""
        if epoch not in self._totals:
            self._totals[epoch] = count_slots(self.recipe, epoch)
        return slots_in(self.recipe, self._totals[epoch])

    def footprint(self, num_workers: int = 0, *, plans_in_workers: bool = False) -> MemoryFootprint:
        """Return the peak memory of a rank, to check against `Buffers`."""
        recipe, lanes = self.recipe, self.recipe.num_lanes
        is_endless = recipe.mixing.epoch_end == "carry" and not skips_lanes(recipe)
        if is_endless and recipe.lane_run == self.batch_size:
            # With other values of epoch_end, a device reads every lane in the end.
            lanes //= math.gcd(lanes, self.world.num_devices)
        return MemoryFootprint(
            packer_tokens=lanes * sum(each.buffer_limit for each in recipe.shapes.packings),
            batch_tokens=self.batch_size * recipe.row_tokens // self.world.context_parallel,
            num_workers=num_workers,
            plans_in_workers=plans_in_workers,
        )

    def reader(self, *, pinned: bool = False) -> BatchReader:
        """Return a reader that turns this dataset's plans into batches."""
        packing = self.recipe.packing
        return BatchReader(
            gatherer=Gatherer(self._spec.streams, packing, self._spec.context),
            packing=packing,
            convert=self._convert,
            blocks=BufferPool(pinned=pinned),
        )

    def _plain_reader(self) -> Callable[[DevicePlan], Any]:
        """Return a reader for iterations without a `PackedDataLoader`."""
        return self.reader()

    def check_cache(self, num_workers: int = 0) -> None:
        """Refuse a cache limit that cannot hold this node's concurrent shards."""
        self._fetch_limits(0, num_workers)

    def _fetch_limits(
        self, epoch: int, num_workers: int, planner: int | None = None
    ) -> FetchLimits:
        turn = epoch % lane_cycle(self._spec, self.recipe)
        if turn not in self._needs:
            self._needs[turn] = cache_needs(self._spec, self.recipe, turn)
        limit, needs = self._spec.cache_limit, self._needs[turn]
        return fetch_limits(limit, needs, self.world, num_workers=num_workers, planner=planner)

    def read_ahead(
        self, sequence: PackSequence, num_workers: int = 0, planner: int | None = None
    ) -> ReadAhead:
        """Return the shard prefetch of an iteration; arguments as `fetch_limits`."""
        streams, fetcher = self._spec.streams, None
        if any(stream.cache.needs_fetch for stream in streams):
            limits = self._fetch_limits(sequence.epoch, num_workers, planner)
            fetcher = ShardPrefetcher(streams, limits)
        return ReadAhead(fetcher, sequence)

    # Iteration.

    def _begin(self, worker: int, key: str) -> PackSequence:
        sequence = self._next_sequence(worker, key)
        self.at = Progress(epoch=sequence.epoch, position=sequence.position)
        return sequence

    def _next_sequence(self, worker: int, key: str) -> PackSequence:
        self._take_over_run()
        start, self._worker_start = self._worker_start, None
        if start is not None:
            self.counter.begin(worker, key, start.epoch)
            return self._sequence(start)
        epoch = self.counter.begin(worker, key)
        if epoch != self._start.epoch or not self._start.position:
            # Not in the constructor: a loaded state may have another lane_run.
            check_whole_batches(self.recipe)
            return self._sequence(self._start_of(epoch))
        sequence = self._sequence(self._start)
        check_within_epoch(sequence, self._start.position, self._saved_size)
        if sequence.is_finished:
            # The state was taken after the epoch's last batch, so the next epoch follows.
            self.counter.begin(worker, key, epoch + 1)
            return self._sequence(Progress(epoch=epoch + 1))
        check_at_batch(sequence.position, self._start.position, self.batch_size)
        return sequence

    def _sequence(self, start: Progress) -> PackSequence:
        self._latest = epoch_sequence(
            self.recipe, self._view, replace(start, snapshots=self._snapshots_at(start))
        )
        return self._latest

    def _snapshots_at(self, start: Progress) -> list[State]:
        """Return snapshots from which planning can resume, as far as they are known."""
        latest = self._latest if self.recipe.mixing.epoch_end == "carry" else None
        if latest and (latest.epoch, latest.position) <= (start.epoch, start.position):
            # Lanes continue across epochs: start from where the last epoch left them.
            return start.snapshots or latest.snapshots()
        return start.snapshots

    def note_end(self, sequence: PackSequence) -> None:
        """Record that an iteration is finished."""
        progress = Progress(epoch=sequence.epoch + 1)
        self.note(sequence, replace(progress, snapshots=self._snapshots_at(progress)))

    def continues(self) -> bool:
        """Whether a loop continues after an iteration; each epoch is a loop of its own."""
        return False

    def abandon(self) -> None:
        """Note that an iteration failed: the next one plans from its start."""
        self._latest = None  # planning may have stopped halfway
        super().abandon()

    def batches(self) -> Iterator[Batch]:
        """Iterate the next epoch; in a torch worker, every num_workers-th batch of it."""
        info = get_worker_info()
        num_workers = info.num_workers if info else 0
        footprint = self.footprint(num_workers, plans_in_workers=info is not None)
        max_prefetch(self.buffers, footprint, 1)
        if info is None:
            self.check_world()
            self.ask()
            return close_at_exit(self._batches(None, 0, 0))
        # Begin immediately: a worker may be asked for its state before its first batch.
        return close_at_exit(self._batches(self.begin(), info.id, num_workers))

    def _batches(
        self, begun: PackSequence | None, worker: int, num_workers: int
    ) -> Generator[Batch, None, None]:
        """Yield the batches of an iteration without a `PackedDataLoader`, or a worker's share.

        Every worker plans all steps, and reads every num_workers-th.
        """
        step, turns = 0, max(num_workers, 1)
        with self.iteration(begun) as sequence:
            read, base = self._plain_reader(), sequence.position
            num_moves = self.num_moves
            ahead = self.read_ahead(sequence, num_workers, worker if num_workers else None)
            window = self._view.window
            with closing(sequence), closing(ahead):
                ahead.look()
                while (plan := sequence.next(fetch=step % turns == worker)) is not None:
                    step += 1
                    finished = ahead.look()
                    if (step - 1) % turns == worker:
                        # A worker knows only its own progress: assume that its round is complete.
                        rounds = -(-step // turns) * turns
                        position = base + rounds * window if num_workers else plan.position
                        ahead.need_for(plan)
                        batch = whole(read(plan))
                        if num_moves != self.num_moves:
                            raise self.moved()
                        self.note(sequence, Progress(epoch=plan.epoch, position=position))
                        yield batch
                        del batch
                    ahead.finish(finished)
            if not step and not base:
                check_not_empty(self.recipe, sequence.epoch)
            if not num_workers:
                self.note_end(sequence)

    # State.

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin at the start of an epoch."""
        self._resume_from(Progress(epoch=epoch))

    def state_dict(self) -> State:
        """Return the state after the batch last delivered; in a torch worker, that worker's own."""
        if self.is_elsewhere:
            raise ResumeError(
                "batches were delivered by a loader, so the dataset cannot know its position; "
                "use dataset.state_after(batch) with the last batch, or loader.state_dict()"
            )
        state, info = self.state_here(), get_worker_info()
        if info is not None:
            state |= {"worker": [info.id, info.num_workers], "window": self._view.window}
        return state

    def state_here(self) -> State:
        """Return the state of this process's own iterations, ignoring other processes."""
        progress = self.at or self._worker_start or self._start_of(self.counter.next_epoch)
        return self._state_of(progress)

    def _state_of(self, progress: Progress) -> State:
        state = encode_state(self.recipe, self._digests, progress)
        return state | balance_in_state(self.recipe, self._view, progress.position)

    def _start_of(self, epoch: int) -> Progress:
        """Return where an epoch begins: at the loaded state, if it is in this epoch."""
        return self._start if epoch == self._start.epoch else Progress(epoch=epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration, without beginning it."""
        start = self._worker_start or self._start_of(self.counter.next_epoch)
        position, window = start.position, self._view.window
        if not position:
            return start.epoch
        slots = self._slots_in(start.epoch)
        if position >= packs_in(self.recipe, self._totals[start.epoch]):
            position = -(-position // window) * window  # padding completes the step
        return start.epoch + (position >= slots)

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
        return self._state_of(progress)

    def load_state_dict(self, state: State) -> None:
        """Resume from `state`, with its run's lanes and packing method."""
        shape = run_shape(state)
        check_lanes(self._spec.order, shape.num_lanes)
        size = self._spec.mixing.global_batch_size or shape.global_batch_size
        try:
            saved = recipe = build_recipe(self._spec, shape)
            if size != shape.global_batch_size:
                recipe = build_recipe(self._spec, shape._replace(global_batch_size=size))
        except ConfigError as error:
            raise ResumeError(f"the state does not fit this dataset: {error}") from error
        progress = decode_state(state, saved, self._digests)
        check_resized(saved, recipe, progress)
        check_balance(state, saved, self._view, lambda: count_slots(saved, progress.epoch))
        is_of_worker = check_saving_worker(state, self._view)
        self._use_recipe(recipe)
        self._saved_size = saved.global_batch_size
        if is_of_worker:
            self._worker_start, self.at, self._current = progress, None, None
        else:
            self._resume_from(progress)

    def _resume_from(self, progress: Progress) -> None:
        self._start = progress
        self.num_moves += 1
        self.go_to(progress.epoch)
        self.counter.run = [1, progress.epoch, progress.position, *kept_shape(self.recipe)]

    def _take_over_run(self) -> None:
        """Adopt a state that the training process loaded since this persistent worker started."""
        is_set, epoch, position, *kept = self.counter.run
        if not is_set:
            return
        if tuple(kept) != kept_shape(self.recipe):
            num_lanes, lane_run, size, method = kept
            shape = RunShape(num_lanes, lane_run, size, METHODS[method])
            self._use_recipe(build_recipe(self._spec, shape))
        if (epoch, position) != (self._start.epoch, self._start.position):
            self._start = Progress(epoch=epoch, position=position)
