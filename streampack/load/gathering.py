"""One state of all ranks: their places are the same, and each has snapshots of its own lanes.

::

    rank 0    position 4096    lanes 0, 2  --.
    rank 1    position 4096    lanes 1, 3  --+-->  position 4096    lanes 0, 1, 2, 3

A rank's state is whole without the others': a lane that it has no snapshot of is planned again from
the epoch's start (with epoch_end="carry" the run's). That takes some 0.3 us a sample, and where
there are no length files the lane's shards up to there.

Cost: the states go to all ranks once, some KB for each lane, and stream where packs hold one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import distributed

from streampack.errors import ResumeError
from streampack.types import State

__all__ = ["gather_state", "join_states"]


def gather_state(state: State, group: Any = None) -> State:
    """Return the state with the snapshots of all ranks, in each of them; all must call this.

    Args:
        state: Of this rank.
        group: torch's process group; None: all ranks, or this one where there is no group.

    Raises:
        ResumeError: If the ranks do not stand at the same step of the same run.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return join_states([state])
    states: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(states, state, group=group)
    return join_states(states)


def join_states(states: Sequence[State]) -> State:
    """Return the state of several ranks, which differ in their snapshots alone.

    Raises:
        ResumeError: Naming the first key in which they differ else, or that they have no snapshots.

    >>> ranks = [{"position": 8, "snapshots": f'[{{"lane":{n},"column":0}}]'} for n in (1, 0)]
    >>> join_states(ranks)["snapshots"]
    '[{"lane":0,"column":0},{"lane":1,"column":0}]'
    """
    first = states[0]
    snapshots: dict[tuple[int, int], State] = {}
    for rank, state in enumerate(states):
        if "snapshots" not in state:
            raise ResumeError(
                "states of a dataset of iterables are each rank's own and cannot be joined; save "
                "loader.state_dict() of every rank, and load it in the same rank"
            )
        for key, value in first.items():
            if key != "snapshots" and state.get(key) != value:
                raise ResumeError(
                    f"rank 0 stands at {key}={value!r:.80}, but rank {rank} at "
                    f"{state.get(key)!r:.80}; gather states after the same step on every rank"
                )
        for snapshot in json.loads(state["snapshots"]):
            snapshots.setdefault((snapshot["lane"], snapshot["column"]), snapshot)
    joined = [snapshots[place] for place in sorted(snapshots)]
    return first | {"snapshots": json.dumps(joined, separators=(",", ":"))}
