"""What reads the batches of a plan: readers, memory, caches, and where tokens come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from streampack.batch.buffer_pool import BufferPool
from streampack.batch.formats.registry import Formatter
from streampack.config import Buffers
from streampack.gather.context_slice import ContextSlice
from streampack.gather.gather import Gatherer
from streampack.gather.shard_prefetch import FetchLimits, ShardPrefetcher, most_threads
from streampack.plan.chapter_edits import warn_of_skips
from streampack.plan.device_plan import DevicePlan, touched_lanes
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, run_fingerprint
from streampack.planned.build import chapter_spec
from streampack.planned.cache_budget import (
    CacheWorkingSet,
    ReadAhead,
    cache_needs,
    fetch_limits,
    lane_cycle,
)
from streampack.planned.left_snapshots import LeftSnapshots
from streampack.planned.replanning import costs_tokenizing
from streampack.planned.run_state import RunState, digests_of, first_state
from streampack.planned.spec import DatasetSpec
from streampack.runtime.batch_reader import BatchReader
from streampack.runtime.memory_budget import MemoryFootprint, max_prefetch
from streampack.runtime.provenance import Provenance
from streampack.runtime.rank_digest import RankView
from streampack.runtime.resumable import ResumableRun


class ReadableRun(ResumableRun[PackSequence, Progress]):
    """A planned run and what reads it; see `PlanEngine`."""

    state: RunState

    def __init__(
        self, spec: DatasetSpec, convert: Formatter, buffers: Buffers, *, finds_world: bool
    ) -> None:
        super().__init__(spec.world, finds_world=finds_world)
        self.buffers = buffers
        self._whole = spec  # the dataset's arguments, without those of chapters
        self._digests = digests_of(spec)
        self.left = LeftSnapshots(spec.world, self._digests)
        self._convert = convert
        self._needs: dict[tuple[Recipe, int], CacheWorkingSet] = {}  # by phase of a `lane_cycle`
        self.state = first_state(spec)
        for number in range(len(self.run) - 1, -1, -1):  # ends with the first
            self.state = self._in(self.state, number)
            max_prefetch(buffers, self.footprint(), 1)
            self.check_cache()
        warn_of_skips(self.run, self.state.skips)

    def _in(self, state: RunState, number: int) -> RunState:
        """Return a state with this chapter as the current one; all epochs are alike."""
        if not state.chapters:
            return state
        spec = chapter_spec(self._whole, state.chapters[number].chapter)
        spec = replace(spec, context=spec.slice_for(self._convert))
        return state._replace(number=number, spec=spec)

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
        return self.state.run.recipes[self.state.number]

    def _step_before(self, number: int, position: int) -> int:
        """Return the step of this rank's batch, where the batches of all ranks end at a position.

        After a resume inside a step, these may belong to two steps.
        """
        view = self.run.view(number)
        return self.run.step_of(number, view.first_slot(position - view.stride))

    def fingerprint(self) -> dict[str, Any]:
        return run_fingerprint(self.run, self._digests)

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
        recipe = self.recipe
        lanes = recipe.num_lanes
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
        if not self.run.chapters:
            return self.reader()
        states = [self._in(self.state, number) for number in range(len(self.run))]
        readers = [self.reader(state=state) for state in states]
        return lambda plan: readers[plan.epoch](plan)

    def provenance(
        self, recipe: Recipe, context: ContextSlice | None, plan: DevicePlan, number: int
    ) -> Provenance:
        """Return where the tokens of a batch of a plan come from, by its chapter's recipe."""
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
        limit, phase = self.buffers.cache_bytes, epoch % lane_cycle(spec, recipe)
        if limit is not None and (recipe, phase) not in self._needs:
            self._needs[recipe, phase] = cache_needs(spec, recipe, phase)
        needs = CacheWorkingSet() if limit is None else self._needs[recipe, phase]
        return fetch_limits(
            limit,
            needs,
            self.world,
            num_workers=num_workers,
            planner=planner,
            most_threads=most_threads(spec.streams),
        )

    def read_ahead(
        self, sequence: PackSequence, num_workers: int = 0, planner: int | None = None
    ) -> ReadAhead:
        """Return the shard prefetch of an iteration; arguments as `fetch_limits`."""
        streams, fetcher, is_patient = self.spec.streams, None, False
        if any(stream.cache.needs_fetch for stream in streams):
            limits = self._fetch_limits(sequence.epoch, num_workers, planner)
            fetcher = ShardPrefetcher(streams, limits)
            is_patient = any(map(costs_tokenizing, streams))
        return ReadAhead(fetcher, sequence, is_patient=is_patient)
