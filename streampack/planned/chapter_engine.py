"""The engine of a `PackedStreamingDataset` with chapters: one sequence without epochs.

::

    loop --> iteration: chapters of one shape --> the next, of another shape --> ...
               break: the next loop continues after the batch last delivered

Batches say which chapter they belong to in `epoch`, and their place in it in `position`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

from streampack._checks import read_count
from streampack.batch.batch import Batch
from streampack.errors import ConfigError, ResumeError
from streampack.plan.chapter_edits import (
    PlannedChapters,
    RunChapter,
    RunChapters,
    amend_chapters,
    edits_record,
    planned_as_before,
    read_skips,
    skip_problem,
    warn_of_skips,
)
from streampack.plan.device_plan import DevicePlan
from streampack.plan.run_worlds import check_at_batch, check_balance, worlds_in
from streampack.plan.sequence import PackSequence
from streampack.plan.snapshots import MAX_INTEGER
from streampack.plan.spans import RunPlan
from streampack.plan.state import KIND, Progress, read_state
from streampack.planned.build import build_chapters, chapter_spec, chapter_steps
from streampack.planned.engine import PlanEngine, RunState
from streampack.planned.spec import DatasetSpec
from streampack.runtime.memory_budget import max_prefetch
from streampack.runtime.rank_digest import compare_values
from streampack.runtime.torch_worker import TorchWorker, worker_here
from streampack.types import State


class ChapterEngine(PlanEngine):
    """Plans, reads and resumes a run of chapters; see `PlanEngine`."""

    def _build(self, spec: DatasetSpec) -> None:
        self._digests = [stream.growing_digest for stream in spec.streams]
        self._written = [
            RunChapter(chapter, number, chapter_steps(spec, chapter))
            for number, chapter in enumerate(spec.chapters)
        ]
        run, chapters = self._plan(self._written)
        self.state = RunState(run, spec, chapters, skips=list(spec.skip))
        for number in range(len(run) - 1, -1, -1):  # ends with the first
            self.state = self._in(self.state, number)
            max_prefetch(self.buffers, self.footprint(), 1)
            self.check_cache()
        warn_of_skips(run, self.state.skips)

    def _plan(self, chapters: RunChapters, **known: Any) -> PlannedChapters:
        """Plan chapters; `known` are arguments of `build_chapters`."""
        run = build_chapters(self._whole, [each.chapter for each in chapters], **known)
        return PlannedChapters(run, chapters)

    def _spec_of(self, number: int) -> DatasetSpec:
        return chapter_spec(self._whole, self.state.chapters[number].chapter)

    def _in(self, state: RunState, number: int) -> RunState:
        """Return a state with this chapter as the current one."""
        spec = chapter_spec(self._whole, state.chapters[number].chapter)
        spec = replace(spec, context=spec.slice_for(self._convert))
        return state._replace(number=number, spec=spec)

    # Sizes.

    def __len__(self) -> int:
        """Return the number of batches of this rank in the run; a TypeError if it has no end."""
        num_batches = 0
        for span in self.run.spans:
            if span.num_slots is None:
                raise TypeError(
                    f"chapter {span.number}, the run's last, has no end, so the run has no length"
                )
            num_batches += span.num_slots // self.run.view(span.number).stride
        return num_batches

    # Iteration.

    @property
    def _reached(self) -> Progress:
        return self.state.at or self.state.start

    def ask(self) -> None:
        """Note that an iterator was requested: a loop continues where the last one was left."""

    def continues(self) -> bool:
        """Whether the run has another chapter after the iteration that ended."""
        reached = self._reached
        slots = self.run.spans[reached.epoch].num_slots
        is_over = slots is not None and reached.position >= slots
        return not (is_over and reached.epoch + 1 == len(self.run))

    def _begin(self, worker: int, key: str) -> RunState:
        if worker_here():
            self._begin_in_worker(worker, key)
        start = self._reached
        first = self.next_epoch
        stop = first + 1
        while stop < len(self.run) and (
            self._reads_all or self._spec_of(stop).shape == self._spec_of(first).shape
        ):
            stop += 1
        latest, skips = self.state.latest, self.state.skips
        walk = latest.walk_state(start.epoch, start.position) if latest else None
        sequence = PackSequence(self.run, start, walk=walk, skips=skips, stop=stop)
        state = self._in(self.state, first)
        return state._replace(at=start, current=sequence, latest=sequence)

    _reads_all = False  # whether an iteration goes through chapters of several shapes

    def _begin_in_worker(self, worker: int, key: str) -> None:
        self._reads_all = True
        if self.counter.begin(worker, key):
            raise ResumeError(
                f"worker {worker}: a second loop under torch's DataLoader cannot know where the "
                "first was left; use "
                "PackedDataLoader, or load dataset.state_after(batch) before the loop"
            )
        is_set, chapter, position, *_ = self.counter.run
        start = self.state.start
        if is_set and (chapter, position) != (start.epoch, start.position):
            start = Progress(epoch=chapter, position=position)
        self.state = self.state._replace(at=None, start=start)

    def note_end(self, sequence: PackSequence) -> None:
        position = sequence.num_slots if sequence.num_slots is not None else sequence.position
        end = Progress(epoch=sequence.epoch, position=position, snapshots=sequence.snapshots())
        self.note(sequence, end)

    def _batches(
        self, begun: PackSequence | None, worker: TorchWorker
    ) -> Generator[Batch, None, None]:
        self._reads_all = True
        try:
            yield from super()._batches(begun, worker)
        finally:
            self._reads_all = False

    def _plain_reader(self) -> Callable[[DevicePlan], Any]:
        states = [self._in(self.state, number) for number in range(len(self.run))]
        readers = [self.reader(state=state) for state in states]
        return lambda plan: readers[plan.epoch](plan)

    def set_epoch(self, epoch: int) -> None:
        """Accept 0, for trainers that always call it; a run has no epochs."""
        if epoch:
            raise ConfigError(
                f"set_epoch({epoch}): a run of chapters has no epochs; omit it, the next loop "
                "continues the run"
            )

    # State.

    def _state_of(self, progress: Progress) -> State:
        edits = edits_record(self.state.chapters, self.state.skips)
        return super()._state_of(progress) | edits

    def state_dict(self) -> State:
        """Return the state of the run; only the training process knows it."""
        if worker_here():
            raise ResumeError(
                "a worker does not know where a run of chapters stands; save "
                "dataset.state_after(batch), which fits any number of workers"
            )
        return super().state_dict()

    @property
    def next_epoch(self) -> int:
        return _after_edge(self.run, self._reached).epoch

    def load_state_dict(self, state: State) -> None:
        """Resume from `state`; later chapters, skips and streams may differ from its own."""
        saved = read_state(state, KIND)
        skips, worlds = read_skips(saved), worlds_in(saved)
        planned, progress = planned_as_before(saved, self._written, self._plan, self._digests)
        current, run = progress.epoch, planned.run
        view = run.view(current)
        num_packs = run.spans[current].num_slots or MAX_INTEGER
        check_balance(saved, run.recipes[current], view, lambda: num_packs)
        check_at_batch(progress.position, progress.position, view)
        # Those that the state knows of were skipped then.
        warn_of_skips(run, [skip for skip in self.state.skips if skip not in skips], progress)
        skips = sorted({*self.state.skips, *skips})
        if (problem := skip_problem(run, progress, view.stride, skips)) is not None:
            raise ResumeError(problem)
        loaded = self.state._replace(**planned._asdict(), skips=skips, latest=None)
        loaded = self._in(loaded, _after_edge(run, progress).epoch)
        self._resume_from(loaded, progress, worlds)

    def check_state(self, state: State) -> tuple[int, int]:
        """Check that a state belongs to this run, and return its chapter and position."""
        saved = read_state(state, KIND)
        planned_as_before(saved, self._written, self._plan, self._digests)
        return saved["epoch"], saved["position"]

    # Changes at run time; all ranks must ask for the same.

    def _changed(self) -> RunState:
        """Return a state in which the next iteration, in a loader's same loop, begins here."""
        state, here = self.state, self._reached
        changes, moves = state.changes + 1, state.moves + 1  # a move ends a dataset's iterator
        past = self.worlds(here.epoch)
        return state._replace(past=past, start=here, at=here, changes=changes, moves=moves)

    def _compare(self, **asked: Any) -> Progress:
        """Return where the next step begins, once all ranks asked for the same there."""
        at = _after_edge(self.run, self._reached)
        compare_values(asked | {"position": (at.epoch, at.position)}, self.world)
        return at

    def amend(self, weights: Any) -> None:
        """End the running chapter at the next global batch, and begin one with other weights."""
        # Also what is not a mapping: a rank that raised alone would leave the others waiting.
        shown = {k: str(v) for k, v in weights.items()} if isinstance(weights, Mapping) else weights
        progress = self._compare(weights=shown)
        number, size = progress.epoch, self.run.recipes[progress.epoch].global_batch_size
        steps = -(-progress.position // size)
        amended = amend_chapters(self.state.chapters, number, weights, after=steps)
        turns = [recipe.lane_turn for recipe in self.run.recipes]
        if steps:
            turns.insert(number, turns[number])
        planned = self._plan(
            amended,
            num_lanes=self.recipe.num_lanes,
            turn_of=lambda each, _: turns[each] if each < len(turns) else None,
        )
        # A state in the chapter that is amended as a whole would have its former weights.
        is_replaced = self._reached.epoch == number and not steps
        latest = None if is_replaced else self.state.latest
        changed = self._changed()._replace(**planned._asdict(), latest=latest)
        self.state = self._in(changed, number)

    def skip(self, steps: int) -> None:
        """Skip the next global batches, from the next edge on."""
        progress = self._compare(steps=steps)
        span = self.run.spans[progress.epoch]
        first = span.step_at(progress.position + span.recipe.global_batch_size - 1)
        skips = sorted([*self.state.skips, (first, first + read_count("steps", steps))])
        stride = self.run.view(progress.epoch).stride
        if (problem := skip_problem(self.run, progress, stride, skips)) is not None:
            raise ConfigError(problem)
        warn_of_skips(self.run, [(first, first + steps)], progress)
        self.state = self._changed()._replace(skips=skips)


def _after_edge(run: RunPlan, progress: Progress) -> Progress:
    """Return the start of the next chapter for the end of one."""
    slots = run.spans[progress.epoch].num_slots
    if slots is None or progress.position < slots or progress.epoch + 1 == len(run):
        return progress
    return Progress(epoch=progress.epoch + 1, snapshots=progress.snapshots)
