"""A training job that is delayed, killed and resumed, in one process without clock or threads.

::

    seed --> setup, worlds, faults, who moves next        (nothing else is left to chance)

    rank 0    plan | plan, gather | step 0 | save |   step 1  x killed at its 93rd use of the disk
    fetcher     fetch 0.0 ....waits for the store....| fetch 0.1
    worker               gather .waits for the lock..|  gather
    job 2     another world, from the last saved state --> end of the epoch

The plan, the shard cache and the gatherer are the real ones. Only the store, the disk
(`memorydisk.py`) and the scheduling are simulated. An actor that waits for the store or a lock is
stopped there, keeps its locks, and later repeats the operation.

The checker verifies that every device batch equals that of the unbroken run, that each slot of the
epoch counts once across resumes, that no file has wrong bytes under its final name, that cache
limits are respected, that no actor waits forever, that errors only follow faults, and that the next
start removes all leftovers.

``python -m tests.helpers.faults.simulation SEED`` replays one schedule and prints its events.
"""

from __future__ import annotations

import copy
import errno
import json
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from streampack.errors import DataError, StreampackError, WorkerError
from streampack.gather.gather import Gatherer
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.state import Progress, run_shape
from streampack.storage.materialize import Downloader
from streampack.stores.failures import DamagedError
from streampack.streams import TokenStream
from streampack.streams import shard_pool as recent_module
from streampack.streams.shard_pool import ShardPool
from streampack.types import Int64Array
from streampack.world import World
from tests.helpers.caches import plain_name
from tests.helpers.faults.memorydisk import Killed, MemoryDisk, Waits
from tests.helpers.faults.setups import Planner, Setup, make_setups, open_remote
from tests.helpers.planning import decode_epochs, encode_epochs

MAX_JOBS = 3
MAX_TURNS = 20_000
Steps = Iterator[Callable[[], bool] | None]


class BrokenPromiseError(AssertionError):
    """The simulation found a broken guarantee."""


# ---------------------------------------------------------------------------- one start of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of one start of the job; probabilities are per use."""

    victim: int | None = None
    """The process of which one use goes wrong."""
    at: int = 0
    """The number of that use."""
    of_store: bool = False
    """Whether uses of the store are counted, not those of the disk."""
    kind: str = "kill"
    """What happens then: "kill", "short", "refused", or the name of an errno."""
    end_turn: int | None = None
    """The turn in which all processes are killed."""
    loss_turn: int | None = None
    """The turn in which a node loses its cache."""
    delay: float = 0.0
    damage: float = 0.0
    refusal: float = 0.0
    disk_error: float = 0.0

    @property
    def may_raise(self) -> bool:
        """Whether these faults may end a process with an error."""
        return bool(self.damage or self.refusal or self.disk_error) or self.kind != "kill"


@dataclass(slots=True, eq=False)
class Process:
    """A rank or a worker, with everything it would lose if it were killed."""

    name: str
    node: int
    recent: ShardPool = field(default_factory=lambda: ShardPool(512, 4_000_000))
    uses_left: int = -1
    is_alive: bool = True
    planned: deque[Any] = field(default_factory=deque)
    num_planned: int = 0
    needed: deque[tuple[int, int]] = field(default_factory=deque)
    inbox: deque[tuple[int, Any]] = field(default_factory=deque)
    rows: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Actor:
    name: str
    process: Process
    steps: Steps
    is_ready: Callable[[], bool] | None = None


class Job:
    """One start of the job: its ranks and workers, from a state until they finish or die."""

    def __init__(
        self, simulation: Simulation, state: dict[str, Any] | None, faults: Faults
    ) -> None:
        self.simulation = simulation
        self.disk = simulation.disk
        self.rng = simulation.rng
        self.setup = simulation.setup
        self.faults = faults
        self.state = state
        self.alarms: list[float] = []
        self.num_turns = 0
        self.turns_left = MAX_TURNS
        self.is_dying = False
        self._choose_world()
        self.delivered = [0] * self.num_ranks
        self.ended = [False] * self.num_ranks
        self.actors: list[Actor] = []
        self.processes: list[Process] = []
        for rank in range(self.num_ranks):
            process = self._process(f"rank {rank}", rank // self.per_node)
            self._add(process, process.name, self._rank(process, rank))

    def _choose_world(self) -> None:
        rng, start = self.rng, self.simulation.start
        is_alone = self.simulation.faults is not None
        worlds = [(1, 1)] if is_alone else [(1, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
        self.num_nodes, self.per_node = rng.choice(worlds)
        self.num_ranks = self.num_nodes * self.per_node
        is_odd = start.position % 2 and start.position < self.setup.num_packs[start.epoch]
        self.batch_size = 1 if is_odd else rng.choice([1, 2])
        self.num_workers = 0 if is_alone else rng.choice([0, 0, 1, 2])
        self.num_processes = self.num_ranks * (1 + self.num_workers)
        self.is_limited = is_alone or self.setup.is_large or rng.random() < 0.4
        self.tell(
            f"job of {self.num_nodes} x {self.per_node} ranks, {self.num_workers} workers, "
            f"batch_size {self.batch_size}, limited: {self.is_limited}, from {start.position}; "
            f"{self.faults}"
        )

    def world(self, rank: int) -> World:
        return World(rank=rank, num_ranks=self.num_ranks, ranks_per_node=self.per_node)

    @property
    def num_readers(self) -> int:
        return self.per_node * (2 + self.num_workers)

    def tell(self, text: str) -> None:
        self.simulation.tell(text)

    def _process(self, name: str, node: int) -> Process:
        process = Process(name=name, node=node)
        victim = self.faults.victim
        if victim is not None and len(self.processes) == victim % self.num_processes:
            process.uses_left = self.faults.at
        self.processes.append(process)
        return process

    def _add(self, process: Process, name: str, steps: Steps) -> None:
        self.actors.append(Actor(name=name, process=process, steps=steps))

    # Who moves.

    def run(self) -> bool:
        while self.actors and self.turns_left > 0:
            self.num_turns += 1
            self.turns_left -= 1
            self.disk.now += 0.01
            self._events()
            ready = [a for a in self.actors if a.is_ready is None or a.is_ready()]
            if ready:
                self._move(self.rng.choice(ready))
            elif self.alarms:
                self.disk.now = max(
                    self.disk.now, self.alarms.pop(self.alarms.index(min(self.alarms)))
                )
            elif self.is_dying:
                break
            else:
                raise BrokenPromiseError(
                    f"all actors wait forever: {[actor.name for actor in self.actors]}"
                )
        if self.actors and not self.is_dying:
            raise BrokenPromiseError(
                f"not done after {MAX_TURNS} turns: {[a.name for a in self.actors]}"
            )
        for process in self.processes:
            self._end(process)
        return all(self.ended)

    def _events(self) -> None:
        if self.num_turns == self.faults.end_turn:
            self.tell("all are killed")
            self.is_dying, self.turns_left = True, 0
            self.actors_stop()
        if self.num_turns == self.faults.loss_turn:
            node = self.rng.randrange(self.num_nodes)
            self.tell(f"the cache of node {node} is lost")
            self.disk.lose(self.simulation.folder(node))

    def actors_stop(self) -> None:
        for process in self.processes:
            self._end(process)

    def _move(self, actor: Actor) -> None:
        self.disk.begin(actor.name)
        self.simulation.actor = actor
        recent_module._pool = actor.process.recent
        try:
            actor.is_ready = next(actor.steps)
        except StopIteration:
            self.actors.remove(actor)
        except Killed:
            self._die(actor.process, "killed")
        except StreampackError as error:
            if not (self.faults.may_raise or self.is_dying):
                raise BrokenPromiseError(f"{actor.name} raised without a fault: {error}") from error
            self._die(actor.process, f"raises {type(error).__name__}: {error}")

    def _die(self, process: Process, why: str) -> None:
        self.tell(f"{process.name} {why}")
        self._end(process)
        if not self.is_dying:
            # The launcher then ends the others, though not immediately.
            self.is_dying = True
            self.turns_left = self.rng.randrange(30)

    def _end(self, process: Process) -> None:
        process.is_alive = False
        own = [actor for actor in self.actors if actor.process is process]
        # It is dead before its generators are closed: what they would clean up is not done.
        self.disk.stop(Killed())
        for actor in own:
            self.actors.remove(actor)
            actor.steps.close()  # type: ignore[attr-defined]
        self.disk.release(actor.name for actor in own)

    def again(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                result = call()
            except Waits as stop:
                self.tell(f"{self.disk.actor} waits {stop.why}")
                yield stop.is_ready
            else:
                held = self.disk.held_by(self.disk.actor)
                if held:
                    raise BrokenPromiseError(
                        f"{self.disk.actor} has done its work but still has locks: {held}"
                    )
                return result

    # What they do.

    def _rank(self, process: Process, rank: int) -> Steps:
        setup, world = self.setup, self.world(rank)
        limit = None
        if self.is_limited:
            limit = setup.limit_for(world, self.batch_size, 1 + self.num_workers)
            if self.simulation.faults is not None and setup.keep_zip:
                limit *= 2  # compressed files take space too: each shard would be fetched often
        streams = yield from self.again(lambda: self.simulation.open(process.node, limit))
        recipe, digests = setup.recipe_for(streams), [stream.digest for stream in streams]
        start = self.simulation.start
        if self.state is not None:
            assert run_shape(self.state)[:3] == setup.shape()
            start = decode_epochs(self.state, recipe, digests)
        view = DeviceView(
            place=world.place, num_devices=world.num_devices, batch_size=self.batch_size
        )
        planner, gatherer = Planner(recipe, view, start), Gatherer(streams, recipe.packing)
        self._add(process, f"fetcher {rank}", self._fetcher(process, streams))
        workers = self._start_workers(process, rank, gatherer)
        step = 0
        while True:
            yield from self._plan_ahead(process, planner, streams, workers)
            if not process.planned:
                break
            plan, slot, needs, snapshots = process.planned.popleft()
            rows = yield from self._rows_of(plan, step, workers, gatherer)
            self.simulation.check_batch(plan, rows, view.first_slot(slot))
            step += 1
            self.delivered[rank] = step
            # A step of the optimizer is done once all ranks have theirs.
            yield lambda s=step: min(self.delivered) >= s
            if needs is not None:
                yield from self.again(lambda n=needs.finished: _note(streams, n, "mark_finished"))
            if rank == 0:
                progress = Progress(epoch=plan.epoch, position=plan.position, snapshots=snapshots)
                self.simulation.save(recipe, digests, progress)
            yield None
        planner.close()
        self.ended[rank] = True
        process.is_alive = False  # its workers and its fetcher end with it

    def _plan_ahead(
        self,
        process: Process,
        planner: Planner,
        streams: tuple[TokenStream, ...],
        workers: list[Process],
    ) -> Steps:
        """Plan as many batches ahead as workers may read, and tell them and the fetcher."""
        while len(process.planned) < max(1, 2 * len(workers)):
            planned = yield from self.again(planner.next)
            if planned is None:
                return
            plan, _, needs, _ = planned
            if needs is not None:
                process.needed = deque(map(tuple, needs.ahead.tolist()))
                yield from self.again(lambda n=needs.ahead: _note(streams, n, "mark_planned"))
            if workers:
                number = process.num_planned
                workers[number % len(workers)].inbox.append((number, plan))
            process.num_planned += 1
            process.planned.append(planned)
            yield None

    def _start_workers(self, process: Process, rank: int, gatherer: Gatherer) -> list[Process]:
        workers = []
        for number in range(self.num_workers):
            name = f"worker {rank}.{number}"
            worker = self._process(name, process.node)
            workers.append(worker)
            own = self.simulation.send(gatherer)
            self._add(worker, name, self._worker(worker, process, own))
        return workers

    def _rows_of(self, plan: Any, step: int, workers: list[Process], gatherer: Gatherer) -> Any:
        """Read a batch, or wait for the worker that does; a generator."""
        if not workers:
            rows = yield from self.again(lambda: gatherer.gather(plan.packs, plan.num_rows))
            return rows
        worker = workers[step % len(workers)]
        yield lambda: step in worker.rows or not all(each.is_alive for each in workers)
        if step not in worker.rows:
            raise WorkerError("a worker died")
        return worker.rows.pop(step)

    def _worker(self, worker: Process, rank: Process, gatherer: Gatherer) -> Steps:
        while True:
            yield lambda: bool(worker.inbox) or not rank.is_alive
            if not rank.is_alive:
                return
            step, plan = worker.inbox.popleft()
            rows = yield from self.again(lambda p=plan: gatherer.gather(p.packs, p.num_rows))
            worker.rows[step] = rows

    def _fetcher(self, process: Process, streams: tuple[TokenStream, ...]) -> Steps:
        while True:
            yield lambda: bool(process.needed) or not process.is_alive
            if not process.is_alive:
                return
            stream, shard = process.needed.popleft()
            if not streams[stream].is_here(shard):
                yield from self.again(lambda s=stream, i=shard: streams[s].fetch(i))


def _note(streams: tuple[TokenStream, ...], rows: Int64Array, what: str) -> None:
    for number, stream in enumerate(streams):
        shards = rows[rows[:, 0] == number, 1]
        if len(shards):
            getattr(stream, what)(shards)


# ---------------------------------------------------------------------------- one schedule


class Simulation:
    """One schedule: a training job that is restarted until its epoch is done.

    Chance decides on the faults, unless those of the first start of a single rank are given.
    """

    def __init__(
        self,
        setups: list[Setup],
        seed: int,
        tell: Callable[[str], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.faults = faults
        self.was_hit = False
        self.rng = random.Random(seed)
        # The large ones take long, so they are drawn less often.
        self.setup = self.rng.choices(setups, [1 if each.is_large else 3 for each in setups])[0]
        self.disk = MemoryDisk(self._on_use)
        self.store = Downloader(fetch=self._fetch, fetch_if_there=lambda *_: False)
        self.start = Progress(epoch=self.rng.randrange(2))
        self.actor: Actor | None = None
        self.num_jobs = 0
        self._tell = tell
        self._state: dict[str, Any] | None = None
        self._counts = np.zeros(self.setup.num_packs[self.start.epoch], np.int64)
        self._job: Job | None = None
        self._limit: int | None = None

    def tell(self, text: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.disk.now:8.2f}  {text}")

    @staticmethod
    def folder(node: int) -> Path:
        return Path(f"/sim/node{node}")

    def run(self) -> None:
        before = recent_module._pool
        try:
            is_done = False
            while not is_done:
                is_done = self._start_job(is_last=self.num_jobs >= MAX_JOBS)
            self._check_end()
        finally:
            recent_module._pool = before

    def _start_job(self, *, is_last: bool) -> bool:
        self.num_jobs += 1
        if self.faults is not None:
            faults = self.faults if self.num_jobs == 1 else Faults()
        else:
            faults = Faults() if is_last else self._choose_faults()
        state = self._state
        if state is not None:
            self.start = Progress(epoch=state["epoch"], position=state["position"])
        self._counts[self.start.position :] = 0  # what was delivered after the state does not count
        job = self._job = Job(self, state, faults)
        return job.run()

    def _choose_faults(self) -> Faults:
        rng = self.rng
        kind = rng.randrange(8)
        faults = Faults(
            delay=rng.choice([0.0, 0.1, 0.5]),
            loss_turn=rng.randrange(200) if rng.random() < 0.15 else None,
            damage=rng.choice([0.0, 0.0, 0.05, 0.3]),
        )
        if kind < 4:
            return replace(faults, victim=rng.randrange(12), at=rng.randrange(1, 250))
        if kind == 4:
            return replace(faults, end_turn=rng.randrange(200))
        if kind == 5:
            return replace(faults, refusal=0.1)
        return replace(faults, disk_error=0.005) if kind == 6 else faults

    # What the ranks do with it.

    def open(self, node: int, limit: int | None) -> tuple[TokenStream, ...]:
        self._limit = limit
        return open_remote(self.setup, self.folder(node), self.disk, self.store, limit)

    def send(self, gatherer: Gatherer) -> Gatherer:
        shared = (self.disk, self.store)  # the same for all
        return copy.deepcopy(gatherer, {id(each): each for each in shared})

    def save(self, recipe: Recipe, digests: list[str], progress: Progress) -> None:
        if self.rng.random() < 0.5:
            with_snapshots = self.rng.random() < 0.5
            progress = progress if with_snapshots else replace(progress, snapshots=[])
            self._state = json.loads(json.dumps(encode_epochs(recipe, digests, progress)))
            self.tell(f"saved at {progress.position}, snapshots: {with_snapshots}")

    def check_batch(self, plan: Any, rows: Any, first: int) -> None:
        whole = self.setup.tokens[plan.epoch][first : first + plan.num_rows]
        padding = plan.num_rows - len(whole)  # where a window reaches past the epoch's end
        if not np.array_equal(rows.tokens, np.pad(whole, ((0, padding), (0, 0)))):
            raise BrokenPromiseError(
                f"the batch of slots {first} ... is not that of the unbroken run"
            )
        self._counts[first : first + plan.num_rows] += 1

    def _check_end(self) -> None:
        if not (self._counts == 1).all():
            raise BrokenPromiseError(f"slots were delivered {self._counts.tolist()} times")
        self.disk.begin("the end")
        self.actor = None
        for node in range(2):
            if self.disk.files_in(self.folder(node)):
                open_remote(self.setup, self.folder(node), self.disk, self.store, None)
            for name, content in self.disk.files_in(self.folder(node)).items():
                self._check_file(name, content)

    def _check_file(self, name: str, content: bytes) -> None:
        if ".tmp" in name:
            raise BrokenPromiseError(f"{name} is left over after a start")
        # In a cache of the stream: node0/1/7e8ce556afd31d7a/shard.00000.mds.1b7e40d2
        place, _, basename = name.rpartition("/")
        origin = f"{place.partition('/')[0]}/{plain_name(basename)}"
        whole = [self.setup.shards.get(origin)]
        if basename.endswith(".zip"):
            whole = [text for own, text in self.setup.files.items() if own.startswith(f"{origin}.")]
        if ".streampack" not in name and content not in whole:
            raise BrokenPromiseError(f"{name} has other bytes than it should have")

    # Store and disk.

    def _on_use(self, kind: str, path: Path) -> bool:
        if self.actor is None or self._job is None:
            return False
        faults = self._job.faults
        is_counted = not faults.of_store and (faults.kind != "short" or kind in ("open", "map"))
        if is_counted and self._goes_wrong(faults, f"{kind} {path}"):
            return True
        if faults.disk_error and self.rng.random() < faults.disk_error:
            self.tell(f"{self.disk.actor}: the disk fails at {kind} {path}")
            raise OSError(5, "Input/output error", str(path))
        return False

    def _goes_wrong(self, faults: Faults, what: str) -> bool:
        """Count a use of the current process: raise, or return true if its bytes are cut short."""
        process = self.actor.process
        process.uses_left -= 1
        if process.uses_left != 0:
            return False
        self.was_hit = True
        self.tell(f"{self.disk.actor}: {faults.kind} at {what}")
        if faults.kind == "kill":
            raise self.disk.stop(Killed())
        if faults.kind == "refused":
            raise DataError(f"{what}: refused")
        if faults.kind != "short":
            raise OSError(getattr(errno, faults.kind), "this one failed")
        return True

    def _fetch(
        self,
        files: Any,
        basename: str,
        to: Path,
        *,
        num_bytes: int | None = None,  # noqa: ARG002
        check: Callable[[Path], None] | None = None,
        is_hashed: bool = False,  # noqa: ARG002
    ) -> None:
        job, rng, disk = self._job, self.rng, self.disk
        faults = job.faults if job is not None and self.actor is not None else Faults()
        if job is not None and rng.random() < faults.delay:
            until = disk.now + rng.random() * 2
            job.alarms.append(until)
            raise disk.stop(Waits(f"for the store's {basename}", lambda: disk.now >= until))
        uri = f"{files.remote}/{basename}"
        if rng.random() < faults.refusal:
            raise DataError(f"{uri}: refused", uri=uri, shard=basename)
        whole = self.setup.object_at(uri)
        for _ in range(4):
            is_damaged = rng.random() < faults.damage
            sent = self._damaged(basename, whole) if is_damaged else whole
            if faults.of_store and self._goes_wrong(faults, uri):
                is_damaged, sent = True, whole[: len(whole) // 2]
            disk.write(to, [sent])
            self._check_room(to)
            try:
                if check is not None:
                    check(to)
            except DamagedError as error:
                failure = error
                disk.remove(to)
                continue
            if is_damaged and not faults.disk_error:  # a failing disk is reported later
                raise BrokenPromiseError(f"the damage of {uri} was not noticed")
            return
        raise DataError(f"{uri}: damaged ({failure})", uri=uri, shard=basename) from failure

    def _damaged(self, basename: str, whole: bytes) -> bytes:
        at = self.rng.randrange(len(whole))
        if basename == "index.json":
            return whole[:at]  # it has no hash: other damage of it cannot be seen
        changed = bytearray(whole)
        match self.rng.randrange(4):
            case 0:
                changed[at] ^= 1 << self.rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed += b"\0"
            case _:
                changed = bytearray(whole[::-1])
        return bytes(changed)

    def _check_room(self, to: Path) -> None:
        """Check that a node's shards, including unfinished ones, stay within their limit."""
        job = self._job
        if self._limit is None or job is None or self.actor is None:
            return
        if ".mds" not in to.name:
            # Room is made as a shard is fetched. An earlier job with a larger limit, or none, may
            # have left more.
            return
        node = self.folder(self.actor.process.node)
        taken = sum(
            len(content)
            for name, content in self.disk.files_in(node).items()
            if ".mds" in name and not name.endswith((".lock", ".json"))
        )
        most = self._limit + job.num_readers * self.setup.shard_bytes
        if taken > most:
            raise BrokenPromiseError(
                f"{taken} bytes of shards on a node, more than {most}, with {to}"
            )


def simulate(setups: list[Setup], seed: int, tell: Callable[[str], None] | None = None) -> int:
    """Play one schedule; return how often the job was started."""
    simulation = Simulation(setups, seed, tell)
    try:
        simulation.run()
    except Exception as error:
        raise BrokenPromiseError(
            f"seed {seed}: {error}; play it again: python -m tests.helpers.faults.simulation {seed}"
        ) from error
    return simulation.num_jobs


def main() -> None:
    """Play the schedules that the command line names: SEED, or FIRST LAST."""
    first, *last = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        setups = make_setups(Path(folder))
        for seed in range(first, last[0] if last else first + 1):
            simulate(setups, seed, None if last else lambda text: sys.stdout.write(f"{text}\n"))


if __name__ == "__main__":
    main()
