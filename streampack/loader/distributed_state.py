"""Join the states of all ranks: same position, snapshots of different lanes.

::

    rank 0    position 4096    lanes 0, 2  --.
    rank 1    position 4096    lanes 1, 3  --+-->  position 4096    lanes 0, 1, 2, 3

Each rank's state is enough to resume. A lane without a snapshot is planned again from the start of
the epoch, or of the run with epoch_end="carry". That takes about 0.3 us per sample. Without length
files, the lane's shards up to the position are read as well.

Cost: one all-gather of the states: a few KB per lane, and per stream where packs hold one stream.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from streampack.errors import ResumeError
from streampack.types import State


def join_states(states: Sequence[State]) -> State:
    """Join the states of several ranks, which may differ only in their snapshots.

    Raises:
        ResumeError: If any other key differs, named in the message, or a state has no snapshots.

    >>> ranks = [{"position": 8, "snapshots": f'[{{"lane":{n},"queue":0}}]'} for n in (1, 0)]
    >>> join_states(ranks)["snapshots"]
    '[{"lane":0,"queue":0},{"lane":1,"queue":0}]'
    """
    first = states[0]
    snapshots: dict[tuple[int, int], State] = {}
    for rank, state in enumerate(states):
        if "snapshots" not in state:
            raise ResumeError(
                f"the state of rank {rank} is of a dataset of iterables: they are each rank's own "
                "and cannot be joined; save loader.state_dict() of every rank, and load it in the "
                "same rank"
            )
        for key, value in first.items():
            if key != "snapshots" and state.get(key) != value:
                raise ResumeError(
                    f"rank 0 stands at {key}={value!r:.80}, but rank {rank} at "
                    f"{state.get(key)!r:.80}; gather states after the same step on every rank"
                )
        for snapshot in json.loads(state["snapshots"]):
            snapshots.setdefault((snapshot["lane"], snapshot["queue"]), snapshot)
    joined = [snapshots[key] for key in sorted(snapshots)]
    return first | {"snapshots": json.dumps(joined, separators=(",", ":"))}
