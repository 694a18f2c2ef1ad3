"""What the engines of `PackedStreamingDataset` share: readers, memory, caches, iterations.

::

    begin --> PackSequence --plan--> BatchReader --> batch
                   |
                   '-- ShardPrefetcher follows the plan

The loader plans in its own process and reads elsewhere. Under torch's own DataLoader every worker
has a copy of the engine, plans everything and reads its share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch

from streampack.batch.batch import Batch
from streampack.batch.buffer_pool import BufferPool
from streampack.batch.formats.registry import Formatter
from streampack.config import Buffers
from streampack.errors import ResumeError
from streampack.gather.context_slice import ContextSlice
from streampack.gather.gather import Gatherer
from streampack.gather.shard_prefetch import FetchLimits, ShardPrefetcher
from streampack.plan.chapter_edits import RunChapters
from streampack.plan.device_plan import DevicePlan, DeviceView, touched_lanes
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import RunWorld, balance_in_state
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, encode_state, run_fingerprint
from streampack.planned.build import kept_shape
from streampack.planned.cache_budget import (
    CacheWorkingSet,
    ReadAhead,
    cache_needs,
    fetch_limits,
    lane_cycle,
)
from streampack.planned.refusals import check_not_empty
from streampack.planned.spec import DatasetSpec
from streampack.runtime.batch_reader import BatchReader
from streampack.runtime.loader_session import close_at_exit
from streampack.runtime.memory_budget import MemoryFootprint, max_prefetch
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import RankView
from streampack.runtime.resumable import ResumableRun
from streampack.runtime.torch_worker import TorchWorker, worker_here
from streampack.runtime.whole_batch import whole
from streampack.streams import TokenStream
from streampack.types import State


class RunState(NamedTuple):
    """A run, and where it stands in a process; see `ResumableRun`."""

    run: RunPlan
    """Its epochs or its chapters, and where they begin."""
    spec: DatasetSpec
    """The dataset's arguments; in a run of chapters, those of the current one."""
    chapters: RunChapters = ()
    number: int = 0
    """The current chapter, or 0."""
    skips: Sequence[tuple[int, int]] = ()
    """Ranges [first, stop) of steps of the run that are not delivered."""
    past: Sequence[RunWorld] = ()
    """Worlds of the run before `start`."""
    start: Progress = Progress()
    """Where the run was loaded, set or changed last."""
    worker_start: Progress | None = None
    """Where the next iteration begins, loaded in a worker of torch."""
    saved_size: int = 0
    """The global batch size of the state loaded last; of epochs."""
    at: Progress | None = None
    current: PackSequence | None = None
    latest: PackSequence | None = None
    """The last iteration, which knows snapshots and states of walks."""
    epoch_after: int = 0
    moves: int = 0
    changes: int = 0
    """How often the run was changed; an iteration that began before ends there."""

    @property
    def recipe(self) -> Recipe:
        return self.run.recipe(self.number)

    @property
    def view(self) -> DeviceView:
        return self.run.view(self.number)


class PlanEngine(ResumableRun[PackSequence, Progress]):
    """Plans, reads and resumes a planned dataset; see `EpochEngine` and `ChapterEngine`."""

    state: RunState

    def __getstate__(self) -> dict[str, Any]:
        # A copy in a worker plans for itself.
        return super().__getstate__() | {"state": self.state._replace(latest=None, current=None)}

    def __init__(
        self, spec: DatasetSpec, convert: Formatter, buffers: Buffers, *, finds_world: bool
    ) -> None:
        super().__init__(spec.world, finds_world=finds_world)
        self.buffers = buffers
        self.balance = spec.balance
        self._whole = spec  # the dataset's arguments, without those of chapters
        self.fetched_for_lengths = spec.fetched_for_lengths
        """Bytes of each shard that this process fetched to learn its lengths; grows."""
        self._convert = convert
        self._needs: dict[tuple[Recipe, int], CacheWorkingSet] = {}  # by phase of a `lane_cycle`
        self._build(spec)
        max_prefetch(buffers, self.footprint(), 1)
        self.check_cache()

    @property
    def spec(self) -> DatasetSpec:
        """The dataset's arguments; in a run of chapters, those of the current one."""
        return self.state.spec

    @property
    def size(self) -> str:
        return self.spec.size

    @property
    def run(self) -> RunPlan:
        """Its epochs or its chapters, and where they begin."""
        return self.state.run

    @property
    def recipe(self) -> Recipe:
        """Everything that determines the sequence of packs, or those of the current chapter."""
        return self.state.recipe

    _digests: list[str]
    """A digest of each stream's contents."""

    def _build(self, spec: DatasetSpec) -> None:
        """Set the first state and the digests of the streams."""
        raise NotImplementedError

    def _step_before(self, number: int, position: int) -> int:
        """Return the step of this rank's batch, where the batches of all ranks end at a position.

        After a resume inside a step, these may belong to two steps.
        """
        view = self.run.view(number)
        return self.run.step_of(number, view.first_slot(position - view.stride))

    def fingerprint(self) -> dict[str, Any]:
        return run_fingerprint(self.run, self._digests)

    @property
    def opened(self) -> tuple[TokenStream, ...]:
        """The streams as they are opened."""
        return self._whole.streams

    def start_before(self, place: tuple[int, int]) -> Progress:
        """Return the state loaded last, if it is not of a later place, or the run's start."""
        start = self.state.start
        return start if (start.epoch, start.position) <= place else Progress()

    def worlds(self, number: int) -> list[RunWorld]:
        """Return the worlds of the run up to an epoch or a chapter, in order.

        Where no state says otherwise, this one is assumed to be the first.
        """
        past = self.state.past
        start = self.state.start if past else Progress()
        worlds = [w for w in past if (w.epoch, w.position) < (start.epoch, start.position)]
        for epoch in range(start.epoch, number + 1) if self.run.chapters else [start.epoch]:
            position = start.position if epoch == start.epoch else 0
            world = RunWorld.of(epoch, position, self.world, self.run.view(epoch))
            if not worlds or worlds[-1][2:] != world[2:]:
                worlds.append(world)
        return worlds

    def note_end(self, sequence: PackSequence) -> None:
        """Record that an iteration is finished."""
        raise NotImplementedError

    def continues(self) -> bool:
        """Whether a loop continues after an iteration; of epochs, each is a loop of its own."""
        return False

    def __len__(self) -> int:
        """Return the number of batches of this rank in the next loop."""
        raise NotImplementedError

    @property
    def next_epoch(self) -> int:
        """The epoch or chapter of the next iteration, without beginning it."""
        raise NotImplementedError

    @property
    def _reached(self) -> Progress:
        """The position of the current iteration, or where the next one begins."""
        raise NotImplementedError

    def state_here(self) -> State:
        """Return the state of this process's own iterations, ignoring other processes."""
        return self._state_of(self._reached)

    def _state_of(self, progress: Progress) -> State:
        recipe = self.run.recipe(progress.epoch)
        view = self.run.view(progress.epoch)
        state = encode_state(self.run, self._digests, progress)
        state["worlds"] = json.dumps(self.worlds(progress.epoch), separators=(",", ":"))
        return state | balance_in_state(recipe, view, progress.position)

    def _resume_from(
        self, state: RunState, progress: Progress, past: Sequence[RunWorld] | None = None
    ) -> None:
        """Begin the next iteration there, after these worlds, or None for those so far."""
        past = self.worlds(progress.epoch) if past is None else past
        state = state._replace(start=progress, past=past, moves=self.state.moves + 1)
        epoch, kept = (0, ()) if state.chapters else (progress.epoch, kept_shape(state.recipe))
        self.go_to(state, epoch, [1, progress.epoch, progress.position, *kept])

    def abandon(self) -> None:
        """Note that an iteration failed: the next one plans from its start."""
        super().abandon()
        self.state = self.state._replace(latest=None)  # planning may have stopped halfway

    def rank_view(self) -> RankView:
        """Return the streams and options that every rank must share."""
        spec, streams = self.spec, []
        for name, stream, digest in zip(
            self.recipe.names, spec.streams, self._digests, strict=True
        ):
            index, _, lengths = digest.partition(":")
            folder = str(stream.cache.folder)
            streams.append({"name": name, "folder": folder, "index": index, "lengths": lengths})
        recipe = {key: value for key, value in self.fingerprint().items() if key != "streams"}
        return {"streams": streams, "recipe": recipe | spec.options_of_ranks()}

    def footprint(self, num_workers: int = 0, *, plans_in_workers: bool = False) -> MemoryFootprint:
        """Return the peak memory of a rank, to check against `Buffers`."""
        recipe, lanes = self.recipe, self.recipe.num_lanes
        # With other values of epoch_end, a device reads every lane in the end.
        if recipe.mixing.epoch_end == "carry":
            lanes = len(touched_lanes(recipe, self.state.view))
        return MemoryFootprint(
            packer_tokens=lanes * sum([each.buffer_limit for each in recipe.shapes.packings]),
            batch_tokens=self.spec.batch_tokens // self.world.context_parallel,
            num_workers=num_workers,
            plans_in_workers=plans_in_workers,
        )

    def reader(self, *, pinned: bool = False, state: RunState | None = None) -> BatchReader:
        """Return a reader that turns plans into batches: of this dataset, or of one state of it."""
        state = state or self.state
        weights, packing = state.spec.loss_weights, state.recipe.packing
        return BatchReader(
            gatherer=Gatherer(state.spec.streams, packing, state.spec.context),
            packing=packing,
            convert=self._convert,
            stream_weights=None if weights is None else torch.tensor(weights),
            blocks=BufferPool(pinned=pinned),
        )

    def _plain_reader(self) -> Callable[[DevicePlan], Any]:
        return self.reader()

    def provenances(self) -> Callable[[DevicePlan, int], Provenance]:
        """Return what makes the provenance of a batch of a plan, in the running chapter."""
        return partial(self._provenance, self.recipe, self.spec.context)

    def _provenance(
        self, recipe: Recipe, context: ContextSlice | None, plan: DevicePlan, number: int
    ) -> Provenance:
        packing, epoch, position = recipe.packing, plan.epoch, plan.positions[number]
        return Provenance(
            epoch=epoch,
            position=position,
            step_of=partial(self._step_before, epoch, position),
            stream_names=recipe.names,
            packs_of=lambda: plan.slice(number, number + 1).packs,
            shape=(plan.num_rows, packing.row_tokens * plan.slots_per_pack),
            packing=packing,
            context=context,
            convert=self._convert,
        )

    def check_cache(self, num_workers: int = 0) -> None:
        """Refuse a cache limit that cannot hold this node's concurrent shards."""
        self._fetch_limits(0, num_workers)

    def _fetch_limits(
        self, epoch: int, num_workers: int, planner: int | None = None
    ) -> FetchLimits:
        spec, recipe = self.spec, self.recipe
        limit, phase = spec.cache_limit, epoch % lane_cycle(spec, recipe)
        if limit is not None and (recipe, phase) not in self._needs:
            self._needs[recipe, phase] = cache_needs(spec, recipe, phase)
        needs = CacheWorkingSet() if limit is None else self._needs[recipe, phase]
        return fetch_limits(limit, needs, self.world, num_workers=num_workers, planner=planner)

    def read_ahead(
        self, sequence: PackSequence, num_workers: int = 0, planner: int | None = None
    ) -> ReadAhead:
        """Return the shard prefetch of an iteration; arguments as `fetch_limits`."""
        streams, fetcher = self.spec.streams, None
        if any(stream.cache.needs_fetch for stream in streams):
            limits = self._fetch_limits(sequence.epoch, num_workers, planner)
            fetcher = ShardPrefetcher(streams, limits)
        return ReadAhead(fetcher, sequence)

    # Iteration.

    def batches(self) -> Iterator[Batch]:
        """Iterate the next epoch; in a torch worker, every num_workers-th batch of it."""
        worker = worker_here()
        footprint = self.footprint(worker.num_workers, plans_in_workers=bool(worker))
        max_prefetch(self.buffers, footprint, 1)
        if not worker:
            self.check_world()
            self.ask()
        # A worker begins immediately: it may be asked for its state before its first batch.
        return close_at_exit(self._batches(self.begin() if worker else None, worker))

    def _batches(
        self, begun: PackSequence | None, worker: TorchWorker
    ) -> Generator[Batch, None, None]:
        """Yield the batches of an iteration without a `PackedDataLoader`, or a worker's share.

        Every worker plans all steps, and reads every num_workers-th.
        """
        number, num_workers, _ = worker
        step, turns = 0, max(num_workers, 1)
        with self.iteration(begun) as sequence:
            read, base = self._plain_reader(), sequence.position
            num_moves = self.state.moves
            ahead = self.read_ahead(sequence, num_workers, number if worker else None)
            stride = self.state.view.stride
            with closing(sequence), closing(ahead):
                ahead.look()
                while (plan := sequence.next(fetch=step % turns == number)) is not None:
                    step += 1
                    finished = ahead.look()
                    if (step - 1) % turns == number:
                        # A worker knows only its own progress: assume that its round is complete.
                        rounds = -(-step // turns) * turns
                        position = base + rounds * stride if num_workers else plan.position
                        ahead.need_for(plan)
                        batch = whole(read(plan))
                        if num_moves != self.state.moves:
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

    def state_dict(self) -> State:
        """Return the state after the batch last delivered; in a torch worker, that worker's own."""
        if self.is_elsewhere:
            raise ResumeError(
                "batches were delivered by a loader, so the dataset cannot know its position; "
                "use dataset.state_after(batch) with the last batch, or loader.state_dict()"
            )
        state, worker, stride = self.state_here(), worker_here(), self.state.view.stride
        if worker:
            state |= {"worker": [worker.number, worker.num_workers], "window": stride}
        return state

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
