"""The snapshots that ranks leave for each other, so that any rank's state has those of all lanes.

::

    rank 0   lanes 0, 2   --window edge--> store:  run 5f2c..., lane 0: [place, snapshot], twice
    rank 1   lanes 1, 3   --window edge--> store
    rank 0   a state at some place <------ of each lane the last that was left at or before it

Ranks do not wait for each other: what has not arrived, or is of an older window, is replanned.
Snapshots are a function of the run and of their place, so keys name the run by its fingerprint, and
a run that was started again, or a second dataset of the same run, may take them.

Cost: a few us a lane when a queue is planned further; see `runtime/rank_store.py` for the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from streampack.plan.device_plan import DevicePlan
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, run_fingerprint
from streampack.planned.run_state import RunState
from streampack.runtime.rank_digest import digest_of_values
from streampack.runtime.rank_store import RankStore
from streampack.runtime.torch_worker import worker_here
from streampack.types import State
from streampack.world import World

Key: TypeAlias = tuple[int, int]
"""A lane, and one of its queues."""
Left: TypeAlias = tuple[int, int, State]
"""Epoch or chapter, position in it, and a snapshot from which planning can resume there."""


class LeftSnapshots:
    """What this process left of its lanes, and what it finds of others.

    `digests` are those of the streams.
    """

    def __init__(self, world: World, digests: Sequence[str]) -> None:
        self._world, self._digests = world, digests
        self._store = RankStore(world)
        self._run: RunPlan | None = None
        self._name = ""  # of the run; found out where it is asked for
        self._last: list[State] | None = None
        self._own: dict[Key, list[Left]] = {}  # the last two

    def __reduce__(self) -> tuple[type[LeftSnapshots], tuple[World, Sequence[str]]]:
        return LeftSnapshots, (self._world, self._digests)

    def _key(self, key: Key) -> str:
        if not self._name and self._run is not None:
            self._name = self._name_of(self._run)
        return f"streampack/{self._name}/{key[0]}/{key[1]}"

    def _name_of(self, run: RunPlan) -> str:
        # Ranks of another group may be elsewhere in the same run.
        return digest_of_values([run_fingerprint(run, self._digests), list(self._world.loading)])

    def _enter(self, run: RunPlan) -> None:
        before = self._run
        if run is not before:
            if before is not None and self._own and self._name_of(run) != self._name_of(before):
                self._own = {}
            self._run, self._name = run, ""

    def leave(self, run: RunPlan, plan: DevicePlan, snapshots: list[State]) -> None:
        """Leave the snapshots that hold from the first batch of a plan on, as far as changed."""
        if snapshots is self._last:
            return
        self._enter(run)
        number, position = place = plan.epoch, plan.positions[0]
        # Queues that a chapter does not use may be of other ranks, which know better.
        lanes = run.lanes(number, position)
        self._last, changed = snapshots, []
        for snapshot in snapshots:
            key = _key_of(snapshot)
            left = self._own.get(key, [])
            is_new = not left or left[-1][:2] > place or _order(left[-1][2]) != _order(snapshot)
            if is_new and snapshot["lane"] in lanes:
                self._own[key] = [*left[-1:], (*place, snapshot)]
                changed.append(key)
        if self._store.is_alone or worker_here().number:
            return  # all workers plan alike, and the first leaves what all know
        view = run.view(number)
        if len(lanes) == run.recipe(number).num_lanes:
            # Then every device plans all lanes.
            changed = [key for key in changed if key[0] % view.num_devices == view.place]
        self._store.put({self._key(key): self._own[key] for key in changed})

    def completed(self, state: RunState, progress: Progress, *, asks: bool = True) -> Progress:
        """Return a place of a run with the last snapshot of each lane at or before it, if known.

        Without `asks`, only those that this process left or began with.
        """
        run, place = state.run, (progress.epoch, progress.position)
        recipe = run.recipe(progress.epoch)
        if not recipe.is_endless and not progress.position:
            return progress
        self._enter(run)
        used = run.uses(progress.epoch) if run.chapters else recipe.names
        queues = [n for n in range(recipe.num_queues) if recipe.is_mixed or recipe.names[n] in used]
        lanes = range(recipe.num_lanes)
        asks = asks and not self._store.is_alone
        keys = [self._key((lane, queue)) for lane in lanes for queue in queues] if asks else []
        others = self._store.get(keys)
        start = state.start
        known: Iterable[Left] = chain(
            [(*place, snapshot) for snapshot in progress.snapshots],
            [(start.epoch, start.position, snapshot) for snapshot in start.snapshots],
            *list(self._own.values()),
            *others.values(),
        )
        first = (0 if recipe.is_endless else progress.epoch, 0)
        found: dict[Key, State] = {}
        for epoch, position, snapshot in known:
            if first <= (epoch, position) <= place:
                key = _key_of(snapshot)
                found[key] = max(found.get(key, snapshot), snapshot, key=_order)
        return replace(progress, snapshots=list(found.values()))


def _key_of(snapshot: State) -> Key:
    return snapshot["lane"], snapshot["queue"]


def _order(snapshot: State) -> tuple[int, int]:
    return snapshot["num_packs"], snapshot.get("chapter", 0)
