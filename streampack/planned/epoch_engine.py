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
from streampack.planned.engine import PlanEngine, RunState
from streampack.planned.refusals import (
    check_saving_worker,
    check_whole_batches,
    check_within_epoch,
)
from streampack.planned.spec import DatasetSpec
from streampack.runtime.torch_worker import worker_here
from streampack.types import State


class EpochEngine(PlanEngine):
    """Plans, reads and resumes the epochs of a dataset."""

    def _build(self, spec: DatasetSpec) -> None:
        self._digests = [stream.full_digest for stream in spec.streams]
        recipe = build_recipe(spec)
        run, size = RunPlan([recipe], [spec.view()]), recipe.global_batch_size
        self.state = RunState(run, spec, saved_size=size)

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next."""
        at = self.state.at
        epoch = at.epoch if at else self.counter.next_epoch
        return -(-(self.run.num_slots(epoch) or 0) // self.state.view.stride)

    # Iteration.

    def _begin(self, worker: int, key: str) -> RunState:
        if worker_here():
            self._take_over_run()
        sequence = self._next_sequence(worker, key)
        at = Progress(epoch=sequence.epoch, position=sequence.position)
        return self.state._replace(worker_start=None, at=at, current=sequence, latest=sequence)

    def _next_sequence(self, worker: int, key: str) -> PackSequence:
        state = self.state
        start, latest = state.worker_start, state.latest
        if start is not None:
            self.counter.begin(worker, key, start.epoch)
            return self._sequence(start, latest)
        epoch, start = self.counter.begin(worker, key), state.start
        if epoch != start.epoch or not start.position:
            # Not in the constructor: a loaded state may have another lane_turn.
            check_whole_batches(self.recipe)
            return self._sequence(self._start_of(epoch), latest)
        sequence = self._sequence(start, latest)
        check_within_epoch(sequence, start.position, state.saved_size)
        if sequence.is_finished:
            # The state was taken after the epoch's last batch, so the next epoch follows.
            self.counter.begin(worker, key, epoch + 1)
            return self._sequence(Progress(epoch=epoch + 1), sequence)
        check_at_batch(sequence.position, start.position, state.view)
        return sequence

    def _sequence(self, start: Progress, latest: PackSequence | None) -> PackSequence:
        return PackSequence(self.run, replace(start, snapshots=self._snapshots_at(start, latest)))

    def _snapshots_at(self, start: Progress, latest: PackSequence | None) -> list[State]:
        """Return snapshots from which planning can resume, as far as they are known."""
        is_carried = self.recipe.mixing.epoch_end == "carry"
        if (
            latest
            and is_carried
            and (latest.epoch, latest.position)
            <= (
                start.epoch,
                start.position,
            )
        ):
            # Lanes continue across epochs: start from where the last epoch left them.
            return start.snapshots or latest.snapshots()
        return start.snapshots

    def note_end(self, sequence: PackSequence) -> None:
        progress = Progress(epoch=sequence.epoch + 1)
        snapshots = self._snapshots_at(progress, self.state.latest)
        self.note(sequence, replace(progress, snapshots=snapshots))

    # State.

    def set_epoch(self, epoch: int) -> None:
        self._resume_from(self.state, Progress(epoch=epoch))

    @property
    def _reached(self) -> Progress:
        return self.state.at or self._next_start

    @property
    def _next_start(self) -> Progress:
        return self.state.worker_start or self._start_of(self.counter.next_epoch)

    def _start_of(self, epoch: int) -> Progress:
        start = self.state.start
        return start if epoch == start.epoch else Progress(epoch=epoch)

    @property
    def next_epoch(self) -> int:
        start = self._next_start
        position, stride = start.position, self.state.view.stride
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
        size = self.spec.mixing.global_batch_size or shape.global_batch_size
        try:
            saved = recipe = build_recipe(self.spec, shape)
            if size != shape.global_batch_size:
                recipe = build_recipe(self.spec, shape._replace(global_batch_size=size))
        except ConfigError as error:
            raise ResumeError(f"the state does not fit this dataset: {error}") from error
        progress = decode_state(state, RunPlan([saved]), self._digests)
        check_resized(saved, recipe, progress)
        view = self.state.view
        check_balance(state, saved, view, lambda: count_slots(saved, progress.epoch))
        is_of_worker, worlds = check_saving_worker(state, view), worlds_in(state)
        loaded = self._with(recipe)._replace(saved_size=saved.global_batch_size)
        if is_of_worker:
            self.state = loaded._replace(worker_start=progress, at=None, current=None)
        else:
            self._resume_from(loaded, progress, worlds)

    def _with(self, recipe: Recipe) -> RunState:
        return self.state._replace(run=RunPlan([recipe], [self.state.view]), latest=None)

    def _take_over_run(self) -> None:
        """Adopt a state that the training process loaded since this persistent worker started."""
        is_set, epoch, position, *kept = self.counter.run
        if not is_set:
            return
        state = self.state
        if tuple(kept) != kept_shape(self.recipe):
            num_lanes, lane_turn, size, method = kept
            shape = RunShape(num_lanes, lane_turn, size, METHODS[method])
            state = self._with(build_recipe(self.spec, shape))
        if (epoch, position) != (state.start.epoch, state.start.position):
            state = state._replace(start=Progress(epoch=epoch, position=position))
        self.state = state
