"""The engine of a `PackedStreamingDataset`: its iterations, and the states of its run.

::

    begin --> PackSequence --plan--> BatchReader --> batch
                   |
                   '-- ShardPrefetcher follows the plan

    epochs      each iteration is one; the next loop begins the next one
    chapters    one sequence; a loop ends with the run, the next continues after the last batch

Of chapters, batches say which they belong to in `epoch`, and their place in it in `position`.

The loader plans in its own process and reads elsewhere. Under torch's own DataLoader every worker
has a copy of the engine, plans everything and reads its share.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any

from streampack.batch.batch import Batch
from streampack.errors import ConfigError, ResumeError
from streampack.plan.chapter_edits import edits_record
from streampack.plan.lane_ends import packs_in, slots_in
from streampack.plan.run_worlds import RunWorld, balance_in_state, check_at_batch, worlds_in
from streampack.plan.sequence import PackSequence
from streampack.plan.state import KIND, Progress, RunShape, encode_state, read_state
from streampack.planned.build import METHODS, build_recipe, chapter_spec, kept_shape
from streampack.planned.readers import ReadableRun
from streampack.planned.refusals import (
    check_not_empty,
    check_saving_worker,
    check_tokenized,
    check_whole_batches,
    check_within_epoch,
)
from streampack.planned.replanning import check_replanning, costs_tokenizing
from streampack.planned.run_state import (
    RunState,
    after_edge,
    amended,
    chapters_of,
    loaded_chapters,
    loaded_epochs,
    skipping,
)
from streampack.runtime.loader_session import close_at_exit
from streampack.runtime.memory_budget import max_prefetch
from streampack.runtime.rank_digest import compare_values
from streampack.runtime.torch_worker import TorchWorker, worker_here
from streampack.runtime.whole_batch import whole
from streampack.types import State


class PlanEngine(ReadableRun):
    """Plans, reads and resumes a planned dataset."""

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current or next epoch, or in the run.

        A TypeError if its last chapter has no end, or texts would be tokenized to count them.
        """
        numbers: Sequence[int] = range(len(self.run))
        if not self.run.chapters:
            numbers = [self.state.at.epoch if self.state.at else self.counter.next_epoch]
            if not self.recipe.is_endless:
                try:
                    check_tokenized(self.spec.streams, "len(dataset)")
                except ConfigError as error:  # list() takes a TypeError for an unknown length
                    raise TypeError(str(error)) from error
        num_batches = 0
        for number in numbers:
            if (slots := self.run.num_slots(number)) is None:
                raise TypeError(
                    f"chapter {number}, the run's last, has no end, so the run has no length"
                )
            num_batches += -(-slots // self.run.view(number).stride)
        return num_batches

    # The position of the run.

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

    @property
    def _reached(self) -> Progress:
        """The position of the current iteration, or where the next one begins."""
        return self.state.at or self._next_start

    @property
    def _next_start(self) -> Progress:
        if self.run.chapters:
            return self.state.start
        return self.state.worker_start or self._start_of(self.counter.next_epoch)

    def _start_of(self, epoch: int) -> Progress:
        start = self.state.start
        return start if epoch == start.epoch else Progress(epoch=epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration, without beginning it; of a run without chapters."""
        start = self._next_start
        position, stride = start.position, self.state.view.stride
        if not position:
            return start.epoch
        counted = self.run.counted(start.epoch)
        if position >= packs_in(self.recipe, counted):
            position = -(-position // stride) * stride  # padding completes the step
        return start.epoch + (position >= slots_in(self.recipe, counted))

    # Iteration.

    def ask(self) -> None:
        """Note that an iterator was requested; one of chapters continues the run."""
        if not self.state.chapters:
            self.state = self.state._replace(at=None)

    def continues(self) -> bool:
        """Whether a loop continues after an iteration; of epochs, each is a loop of its own."""
        if not self.run.chapters:
            return False
        reached = after_edge(self.run, self._reached)
        slots = self.run.chapters[reached.epoch].num_slots
        return slots is None or reached.position < slots

    def end_of_shape(self, number: int) -> int:
        """Return the epoch or chapter after those from one on whose batches have its shape."""
        chapters = self.state.chapters[number:]
        shapes = [chapter_spec(self._whole, each.chapter).shape for each in chapters]
        alike = takewhile(lambda shape: shape == shapes[0], shapes)
        return number + max(len(list(alike)), 1)

    def _begin(self, worker: TorchWorker, key: str) -> RunState:
        number, num_workers, _ = worker
        if num_workers:
            self._take_over_run()
        if self.state.chapters:
            if num_workers and self.counter.begin(number, key):
                raise ResumeError(
                    f"worker {number}: a second loop under torch's DataLoader cannot know where "
                    "the first was left; use "
                    "PackedDataLoader, or load dataset.state_after(batch) before the loop"
                )
            at = self.state.start if num_workers else self._reached
            start = self.left.completed(self.state, at)
            sequence = PackSequence(self.run, start, skips=self.state.skips)
            state = self._in(self.state, after_edge(self.run, at).epoch)
        else:
            sequence, state = self._next_sequence(number, key), self.state
            at = Progress(epoch=sequence.epoch, position=sequence.position)
        return state._replace(worker_start=None, at=at, current=sequence)

    def _next_sequence(self, worker: int, key: str) -> PackSequence:
        state = self.state
        if (start := state.worker_start) is not None:
            self.counter.begin(worker, key, start.epoch)
            return self._sequence(start)
        epoch, start = self.counter.begin(worker, key), state.start
        if epoch != start.epoch or not start.position:
            # Not in the constructor: a loaded state may have another lane_turn.
            check_whole_batches(self.recipe)
            return self._sequence(self._start_of(epoch))
        sequence = self._sequence(start)
        check_within_epoch(sequence, start.position, state.saved_size)
        if sequence.is_finished:
            # The state was taken after the epoch's last batch, so the next epoch follows.
            self.counter.begin(worker, key, epoch + 1)
            return self._sequence(Progress(epoch=epoch + 1))
        check_at_batch(sequence.position, start.position, state.view)
        return sequence

    def _sequence(self, start: Progress) -> PackSequence:
        start = self.left.completed(self.state, start)
        is_given = start != Progress() and start.epoch == self.state.start.epoch  # set, or loaded
        if is_given and not self.state.replans:
            check_replanning(self.run, self.spec.streams, start)
        return PackSequence(self.run, start)

    def note_end(self, sequence: PackSequence) -> None:
        """Record that an iteration is finished."""
        end = Progress(epoch=sequence.epoch + 1)
        if self.run.chapters:
            position = sequence.position if sequence.num_slots is None else sequence.num_slots
            end = Progress(epoch=sequence.epoch, position=position)
        self.note(sequence, end)

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
                    self.left.leave(self.run, plan, sequence.snapshots())
                    if (step - 1) % turns == number:
                        # A worker knows only its own progress: assume that its round is complete.
                        rounds = -(-step // turns) * turns
                        position = base + rounds * stride if num_workers else plan.position
                        ahead.need_for(plan)
                        batch = whole(read(plan))
                        if num_moves != self.state.moves:
                            raise self.moved()
                        self.note(sequence, Progress(epoch=plan.epoch, position=position))
                        ahead.is_patient = False
                        yield batch
                        del batch
                    ahead.finish(finished)
            if not step and not base:
                check_not_empty(self.recipe, sequence.epoch)
            if not num_workers:
                self.note_end(sequence)

    # State.

    def state_here(self) -> State:
        """Return the state of this process's own iterations, ignoring other processes."""
        return self._state_of(self._reached)

    def _state_of(self, progress: Progress) -> State:
        recipe, worker = self.run.recipe(progress.epoch), worker_here()
        view = self.run.view(progress.epoch)
        if not worker or any(map(costs_tokenizing, self.spec.streams)):
            # A worker is asked after every batch, and continues in the same world.
            progress = self.left.completed(self.state, progress, asks=not worker)
        state = encode_state(self.run, self._digests, progress)
        state["worlds"] = json.dumps(self.worlds(progress.epoch), separators=(",", ":"))
        if self.run.chapters:
            state |= edits_record(self.state.chapters, self.state.skips)
        return state | balance_in_state(recipe, view, progress.position)

    def state_dict(self) -> State:
        """Return the state after the batch last delivered; in a torch worker, that worker's own."""
        worker, stride = worker_here(), self.state.view.stride
        if worker and self.run.chapters:
            raise ResumeError(
                "a worker does not know how far a run of chapters is; save "
                "dataset.state_after(batch), which fits any number of workers"
            )
        if self.is_elsewhere:
            raise ResumeError(
                "batches were delivered by a loader, so the dataset cannot know its position; "
                "use dataset.state_after(batch) with the last batch, or loader.state_dict()"
            )
        state = self.state_here()
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
                "or, if its batch_format has no place for them, use loader.state_dict()"
            )
        progress = Progress(epoch=int(batch["epoch"]), position=int(batch["position"]))
        return self._state_of(progress)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at an epoch; of chapters only 0, as trainers always call it."""
        if not self.run.chapters:
            progress = self.left.completed(self.state, Progress(epoch=epoch))
            self._resume_from(self.state, progress)
        elif epoch:
            raise ConfigError(
                f"set_epoch({epoch}): a run of chapters has no epochs; omit the call, since "
                "the next loop continues the run"
            )

    def load_state_dict(self, state: State, *, replan: bool = False) -> None:
        """Resume from `state`, with its run's lanes and packing method."""
        saved = read_state(state, KIND if self.run.chapters else None)
        worlds, load = worlds_in(saved), loaded_chapters if self.run.chapters else loaded_epochs
        loaded, progress = load(self.state, self._whole, self._digests, saved)
        loaded = loaded._replace(replans=replan)
        if not replan:
            known = self.left.completed(loaded._replace(start=progress), progress)
            check_replanning(loaded.run, loaded.spec.streams, known)
        if check_saving_worker(saved, loaded.run.view(progress.epoch)):
            self.state = loaded._replace(worker_start=progress, at=None, current=None)
        else:
            loaded = self._in(loaded, after_edge(loaded.run, progress).epoch)
            self._resume_from(loaded, progress, worlds)

    def check_state(self, state: State) -> tuple[int, int]:
        """Check that a state belongs to this run, and return its chapter and position."""
        saved = read_state(state, KIND)
        chapters_of(self._whole, self._digests, saved)
        return saved["epoch"], saved["position"]

    def _resume_from(
        self, state: RunState, progress: Progress, past: Sequence[RunWorld] | None = None
    ) -> None:
        """Begin the next iteration there, after these worlds, or None for those so far."""
        past = self.worlds(progress.epoch) if past is None else past
        state = state._replace(start=progress, past=past, moves=self.state.moves + 1)
        epoch, kept = (0, ()) if state.chapters else (progress.epoch, kept_shape(state.recipe))
        self.go_to(state, epoch, [1, progress.epoch, progress.position, *kept])

    def _take_over_run(self) -> None:
        """Adopt what the training process loaded since this worker of it started."""
        is_set, epoch, position, *kept = self.counter.run
        if not is_set:
            return
        state = self.state
        if not state.chapters and tuple(kept) != kept_shape(self.recipe):
            num_lanes, lane_turn, size, method = kept
            shape = RunShape(num_lanes, lane_turn, size, METHODS[method])
            state = state.with_recipe(build_recipe(self.spec, shape))
        if (epoch, position) != (state.start.epoch, state.start.position):
            state = state._replace(start=Progress(epoch=epoch, position=position))
        self.state = state

    # Changes of a run of chapters; all ranks must ask for the same.

    def _compare(self, **asked: Any) -> Progress:
        """Return the position of the run, once all ranks asked for the same there."""
        at = after_edge(self.run, self._reached)
        compare_values(asked | {"position": (at.epoch, at.position)}, self.world)
        return self.left.completed(self.state, self._reached)  # the changed run has another name

    def _change(self, state: RunState, here: Progress) -> None:
        """Adopt a changed run. The next iteration, in a loader's same loop, begins here."""
        changes, moves = state.changes + 1, state.moves + 1  # a move ends a dataset's iterator
        state = self._in(state, after_edge(self.run, here).epoch)
        past = self.worlds(here.epoch)
        state = state._replace(past=past, start=here, at=here, changes=changes, moves=moves)
        self._before, self.state = None, state  # a start before this is no longer undone

    def amend(self, weights: Any) -> None:
        """End the running chapter at the next global batch, and begin one with other weights."""
        # Also what is not a mapping: a rank that raised alone would leave the others waiting.
        shown = {k: str(v) for k, v in weights.items()} if isinstance(weights, Mapping) else weights
        here = self._compare(weights=shown)
        self._change(amended(self.state, self._whole, here, weights), here)

    def skip(self, steps: int) -> None:
        """Skip the next global batches, from the next edge on."""
        here = self._compare(steps=steps)
        self._change(skipping(self.state, here, steps), here)
