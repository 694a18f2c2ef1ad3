"""The epochs and the position of a dataset's iterations, and what a failed start leaves behind.

::

    iteration()    the next epoch, or the loaded state     rolled back if it has no first batch
    note(...)      the position, after every batch         ignored once a later iteration began
    go_to(...)     a state was loaded, or the epoch set    running iterations end with an error

The position of a run is one value, `state`, and each change of it is one assignment. So a signal
handler that raises finds the old value or the new one. A position is what the wing's states
contain: progress in a plan, or positions in the sources.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from reprlib import repr as short_repr
from typing import Any, Generic, Self, TypeVar

from torch.utils.data import IterableDataset

from streampack.batch.batch import Batch
from streampack.errors import ConfigError
from streampack.runtime.arguments import check_epoch
from streampack.runtime.epoch_counter import SharedEpochCounter
from streampack.runtime.rank_digest import RankView, digest_of_values
from streampack.runtime.torch_worker import TorchWorker, worker_here
from streampack.runtime.whole_batch import check_not_of_trainer
from streampack.types import State
from streampack.world import World

Iteration = TypeVar("Iteration")
Position = TypeVar("Position")


class ResumableRun(Generic[Iteration, Position]):
    """The iterations of a dataset: which one is current, its epoch and its position.

    With `finds_world`, the rank was found in the process's surroundings, which may change.
    """

    state: Any
    """A NamedTuple with at least these fields.

    at: The position of the current iteration, or None where the next one begins.
    current: The iteration whose position it is, or None.
    epoch_after: The next epoch, as of this process's last iteration.
    moves: Number of times that a state was loaded, the epoch set or the run changed.
    """

    def __init__(self, world: World, *, finds_world: bool) -> None:
        self.world = world
        self._finds_world = finds_world
        self.counter = SharedEpochCounter()
        self._num_iterations = 0
        # Worker, its word of the counter, and the state; kept until an iteration's first batch.
        self._before: tuple[int, int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        self.check_world()  # a spawned worker cannot see the process group
        return self.__dict__ | {"state": self.state._replace(current=None), "_before": None}

    @property
    def size(self) -> str:
        """The size of a batch, as the dataset's repr names it."""
        raise NotImplementedError

    def check_world(self) -> None:
        """Refuse a rank other than the one found at construction."""
        if self._finds_world:
            self.world.check_group()

    def ask(self) -> None:
        """Note that an iterator was requested; until its first batch, the state is its start.

        This claims no epoch: some trainers call iter() only as a check and discard the iterator.
        """
        self.state = self.state._replace(at=None)

    @contextmanager
    def iteration(self, begun: Iteration | None = None) -> Iterator[Iteration]:
        """Begin an iteration, unless it has `begun`; undo it if it fails before its first batch."""
        iteration = self.begin() if begun is None else begun
        try:
            yield iteration
        except GeneratorExit:  # a loop that is left early closes its iterator: no failure
            raise
        except BaseException:
            self.abandon()
            raise

    def begin(self) -> Iteration:
        """Begin the next epoch, or resume from a loaded state; in a torch worker, for its share.

        Until the first batch is noted, `abandon` restores everything as it was before.
        """
        worker = worker_here()
        # Workers of one iteration share the loader's base seed. A resumed persistent worker keeps
        # its seed, so the key also counts iterations.
        owner = f"{os.getpid()}:{id(self)}"
        if worker:
            owner = f"{worker.base_seed}:{worker.num_workers}"
        key = f"{owner}:{self._num_iterations}"
        self._num_iterations += 1
        self._before = worker.number, self.counter.word(worker.number), self.state
        try:
            self.check_world()
            begun = self._begin(worker, key)
            self.state = begun._replace(epoch_after=self.counter.next_epoch)
        except BaseException:
            self.abandon()
            raise
        iteration: Iteration = begun.current
        return iteration

    def _begin(self, worker: TorchWorker, key: str) -> Any:
        """Begin an iteration under this key of the epoch counter, and return the state in it."""
        raise NotImplementedError

    def note(self, iteration: Iteration, position: Position | None) -> None:
        """Record the position of an iteration after a batch, or None at its end.

        Ignored if a later iteration has begun or a state was loaded since.
        """
        self._before = None
        if iteration is self.state.current:
            self.state = self.state._replace(at=position)

    def moved(self) -> ConfigError:
        """Return the error of an iterator that began before `moves` grew."""
        return ConfigError(
            "since this iterator began, a state was loaded, the epoch was set, or the run was "
            "amended or skipped; it would continue at its old position, which no state knows, so "
            "begin a new one: iter(loader)"
        )

    def abandon(self) -> None:
        """Note that an iteration failed; undo it if it has delivered no batch."""
        before, self._before = self._before, None
        if before is not None:
            worker, word, state = before
            self.counter.put_back(worker, word)
            self.state = state

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process's workers have begun an iteration since this one's last."""
        has_begun = self.counter.has_begun and self.counter.next_epoch != self.state.epoch_after
        return has_begun and not worker_here()

    def go_to(self, state: Any, epoch: int, run: Sequence[int] = ()) -> None:
        """Adopt a state in which this epoch is next; `run` is for workers that live on."""
        words, state = self.counter.words_at(epoch, run), state._replace(at=None, current=None)
        # In one statement, as workers must know of a state that this process has.
        self._before, self.state, self.counter.words[:] = None, state, words

    def fingerprint(self) -> dict[str, Any]:
        """Return everything that determines the packs, as JSON."""
        raise NotImplementedError

    def rank_view(self) -> RankView:
        """Return this rank's inputs to planning, to be compared across ranks."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin at the start of `epoch`, without a loaded state."""
        raise NotImplementedError

    def batches(self) -> Iterator[Any]:
        """Return an iterator over the next epoch, or in a torch worker over its share of it."""
        raise NotImplementedError

    def state_dict(self) -> State:
        """Return the state of this process, as JSON."""
        raise NotImplementedError

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next iteration; change nothing if it does not fit."""
        raise NotImplementedError


Engine = TypeVar("Engine", bound=ResumableRun[Any, Any])


class ResumableDataset(IterableDataset[Batch], Generic[Engine]):
    """Base of the datasets: what users call, on an engine."""

    def __init__(self, engine: Engine, streams: list[Any], stream_names: list[str]) -> None:
        super().__init__()
        self._engine = engine
        self.streams = streams
        """The streams that were passed."""
        self.stream_names = stream_names
        """Their names, indexed by `segments[:, 1]`."""

    @property
    def world(self) -> World:
        """This process's rank and the number of ranks."""
        return self._engine.world

    @property
    def digest(self) -> str:
        """Digest of everything that determines the packs; an online dataset's sources do not count.

        It covers index files, columns, lengths that a length file states, and the options, but not
        ranks, device batches and paths. `loader.stats()`, the log at INFO and ``streampack
        simulate`` report it. It can be derived from a state's `fingerprint`.
        """
        return digest_of_values(self._engine.fingerprint())

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__ = self.__dict__ | {"_engine": copy.copy(self._engine)}
        return new

    def __repr__(self) -> str:
        engine, names = self._engine, short_repr(self.stream_names)  # six of them at most
        return (
            f"{type(self).__name__}(streams={names}, {engine.size}, rank={self.world.rank}, "
            f"num_ranks={self.world.num_ranks})"
        )

    def __getitem__(self, index: Any) -> Batch:
        """Refuse an index, with a ConfigError: batches come in order."""
        raise ConfigError(
            f"dataset[{index!r}]: a {type(self).__name__} has no index, as its batches come in "
            "order; take next(iter(dataset)), or loop over it"
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch at the first batch, or resume; in a torch worker, its share of it."""
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is not None:
            check_not_of_trainer(frame.f_back.f_locals.get("self"))
        return self._engine.batches()

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next loop, from its start.

        This replaces a loaded state and any progress so far: until that loop, the state is the
        start of `epoch`. An iterator that began before raises a ConfigError at its next batch.
        Later loops count up from `epoch`.

        Raises:
            ConfigError: If it is not an integer of at least 0, or is too large for a state.
        """
        self._engine.set_epoch(check_epoch(epoch))

    def state_dict(self) -> State:
        """Return the state of this process after the last delivered batch, as JSON.

        An online dataset's state contains each source's own state, unchanged.

        Raises:
            ResumeError: If workers of a loader iterate, so the state is unknown here.
        """
        return self._engine.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from `state` at the next iteration; change nothing if it does not fit.

        A `PackedStreamingDataset` resumes with other worlds, workers and batch sizes. Its
        global_batch_size may differ too, if the packs stay the same. An online dataset resumes with
        the same ranks and workers. So does a state that was saved in a worker of another loader, as
        by torchdata's StatefulDataLoader. An iterator that began before raises a ConfigError at
        its next batch.

        Raises:
            ResumeError: If the state belongs to another sequence; the message names the difference.
        """
        self._engine.load_state_dict(state)


def engine_of(dataset: ResumableDataset[Engine]) -> Engine:
    """Return a dataset's engine, for loaders and reports."""
    return dataset._engine
