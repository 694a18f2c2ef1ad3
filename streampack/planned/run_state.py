"""What a process runs and its position, as one frozen value, and where it begins.

::

    arguments --> RunState --load, amend, skip, iterate--> RunState --> ...

Each change makes another value, which the engine adopts in one assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streampack.plan.chapter_edits import RunChapter, RunChapters
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import RunWorld
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from streampack.planned.build import build_chapters, build_recipe, chapter_steps
from streampack.planned.spec import DatasetSpec


class RunState(NamedTuple):
    """A run, and its position in a process; see `ResumableRun`."""

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
    replans: bool = False
    """Whether texts may be tokenized again, to plan lanes from their start."""
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
        return self.run.recipes[self.number]

    @property
    def view(self) -> DeviceView:
        return self.run.views[self.number]

    def with_recipe(self, recipe: Recipe) -> RunState:
        """Return a state with another recipe of all epochs."""
        return self._replace(run=RunPlan([recipe], [self.view]), latest=None)


def digests_of(spec: DatasetSpec) -> list[str]:
    """Return a digest of each stream's contents; a chapter's streams may grow."""
    return [each.growing_digest if spec.chapters else each.full_digest for each in spec.streams]


def written_chapters(spec: DatasetSpec) -> RunChapters:
    """Return the chapters of a dataset's arguments."""
    steps = [chapter_steps(spec, chapter) for chapter in spec.chapters]
    return [RunChapter(spec.chapters[n], n, own) for n, own in enumerate(steps)]


def first_state(spec: DatasetSpec) -> RunState:
    """Return the state of a run that begins."""
    if spec.chapters:
        chapters = written_chapters(spec)
        return RunState(build_chapters(spec, chapters), spec, chapters, skips=spec.skip)
    recipe = build_recipe(spec)
    run = RunPlan([recipe], [spec.view()])
    return RunState(run, spec, saved_size=recipe.global_batch_size)


def after_edge(run: RunPlan, progress: Progress) -> Progress:
    """Return the start of the next chapter for the end of one."""
    slots = run.spans[progress.epoch].num_slots if run.chapters else None
    if slots is None or progress.position < slots or progress.epoch + 1 == len(run):
        return progress
    return Progress(epoch=progress.epoch + 1, snapshots=progress.snapshots)
