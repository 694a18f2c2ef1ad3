"""The engine of a `PackedStreamingDataset` without chapters: its epochs, and their states."""

from __future__ import annotations

from dataclasses import replace

from streampack.errors import ConfigError, ResumeError
from streampack.plan.lane_ends import count_slots, packs_in, slots_in
from streampack.plan.recipe import Recipe
from streampack.plan.run_worlds import (
    check_at_batch,
    check_balance,
    check_resized,
    worlds_in,
)
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import (
    Progress,
    RunShape,
    decode_state,
    read_state,
    run_shape,
)
from streampack.planned.build import METHODS, build_recipe, kept_shape
from streampack.planned.engine import PlanEngine
from streampack.planned.refusals import (
    check_saving_worker,
    check_whole_batches,
    check_within_epoch,
)
from streampack.runtime.resumable import ResumableRun
from streampack.runtime.torch_worker import worker_here
from streampack.types import State


class EpochEngine(PlanEngine):
    """Plans, reads and resumes the epochs of a dataset."""

    ROLLED_BACK = (*ResumableRun.ROLLED_BACK, "_latest", "_worker_start")

    def _build(self) -> None:
        self._digests = [stream.full_digest for stream in self._spec.streams]
        self._use_recipe(build_recipe(self._spec))
        self._saved_size = self.recipe.global_batch_size  # of the state loaded last
        self._worker_start: Progress | None = None

    def _use_recipe(self, recipe: Recipe) -> None:
        super()._use_recipe(recipe)
        self.run = RunPlan([recipe], [self._view])
        self._latest: PackSequence | None = None

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next."""
        epoch = self.at.epoch if self.at else self.counter.next_epoch
        return -(-(self.run.num_slots(epoch) or 0) // self._view.stride)

    # Iteration.

    def _begin(self, worker: int, key: str) -> PackSequence:
        sequence = self._next_sequence(worker, key)
        self.at = Progress(epoch=sequence.epoch, position=sequence.position)
        return sequence

    def _next_sequence(self, worker: int, key: str) -> PackSequence:
        if worker_here():
            self._take_over_run()
        start, self._worker_start = self._worker_start, None
        if start is not None:
            self.counter.begin(worker, key, start.epoch)
            return self._sequence(start)
        epoch = self.counter.begin(worker, key)
        if epoch != self._start.epoch or not self._start.position:
            # Not in the constructor: a loaded state may have another lane_turn.
            check_whole_batches(self.recipe)
            return self._sequence(self._start_of(epoch))
        sequence = self._sequence(self._start)
        check_within_epoch(sequence, self._start.position, self._saved_size)
        if sequence.is_finished:
            # The state was taken after the epoch's last batch, so the next epoch follows.
            self.counter.begin(worker, key, epoch + 1)
            return self._sequence(Progress(epoch=epoch + 1))
        check_at_batch(sequence.position, self._start.position, self._view)
        return sequence

    def _sequence(self, start: Progress) -> PackSequence:
        start = replace(start, snapshots=self._snapshots_at(start))
        self._latest = PackSequence(self.run, start)
        return self._latest

    def _snapshots_at(self, start: Progress) -> list[State]:
        """Return snapshots from which planning can resume, as far as they are known."""
        latest = self._latest if self.recipe.mixing.epoch_end == "carry" else None
        if latest and (latest.epoch, latest.position) <= (start.epoch, start.position):
            # Lanes continue across epochs: start from where the last epoch left them.
            return start.snapshots or latest.snapshots()
        return start.snapshots

    def note_end(self, sequence: PackSequence) -> None:
        progress = Progress(epoch=sequence.epoch + 1)
        self.note(sequence, replace(progress, snapshots=self._snapshots_at(progress)))

    def abandon(self) -> None:
        """Note that an iteration failed: the next one plans from its start."""
        self._latest = None  # planning may have stopped halfway
        super().abandon()

    # State.

    def set_epoch(self, epoch: int) -> None:
        with self._changing() as changed:
            changed._resume_from(Progress(epoch=epoch))

    @property
    def _reached(self) -> Progress:
        return self.at or self._worker_start or self._start_of(self.counter.next_epoch)

    def _start_of(self, epoch: int) -> Progress:
        return self._start if epoch == self._start.epoch else Progress(epoch=epoch)

    @property
    def next_epoch(self) -> int:
        start = self._worker_start or self._start_of(self.counter.next_epoch)
        position, stride = start.position, self._view.stride
        if not position:
            return start.epoch
        counted = self.run.counted(start.epoch)
        if position >= packs_in(self.recipe, counted):
            position = -(-position // stride) * stride  # padding completes the step
        return start.epoch + (position >= slots_in(self.recipe, counted))

    def load_state_dict(self, state: State) -> None:
        """Resume from `state`, with its run's lanes and packing method."""
        state = read_state(state)
        shape = run_shape(state)
        size = self._spec.mixing.global_batch_size or shape.global_batch_size
        try:
            saved = recipe = build_recipe(self._spec, shape)
            if size != shape.global_batch_size:
                recipe = build_recipe(self._spec, shape._replace(global_batch_size=size))
        except ConfigError as error:
            raise ResumeError(f"the state does not fit this dataset: {error}") from error
        progress = decode_state(state, RunPlan([saved]), self._digests)
        check_resized(saved, recipe, progress)
        check_balance(state, saved, self._view, lambda: count_slots(saved, progress.epoch))
        is_of_worker, worlds = check_saving_worker(state, self._view), worlds_in(state)
        with self._changing() as changed:
            changed._use_recipe(recipe)
            changed._saved_size = saved.global_batch_size
            if is_of_worker:
                changed._worker_start, changed.at, changed._current = progress, None, None
            else:
                changed._resume_from(progress, worlds)

    def _take_over_run(self) -> None:
        """Adopt a state that the training process loaded since this persistent worker started."""
        is_set, epoch, position, *kept = self.counter.run
        if not is_set:
            return
        if tuple(kept) != kept_shape(self.recipe):
            num_lanes, lane_turn, size, method = kept
            shape = RunShape(num_lanes, lane_turn, size, METHODS[method])
            self._use_recipe(build_recipe(self._spec, shape))
        if (epoch, position) != (self._start.epoch, self._start.position):
            self._start = Progress(epoch=epoch, position=position)
