"""Parts of a state as text, small enough for every state.

::

    the state of a walk  counts by lane and queue, limits, ...  -->  bytes of equal weight together
    segments             rows                                    -->  columns, as differences

Both are compressed. `snapshots` says whether a text is intact.

Cost: O(streams x lanes) a walk: 10 KB for 100 streams and 64 lanes. O(segments) for others.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

from streampack.mix import ScheduleState
from streampack.mix.schedule import OWED_STEP
from streampack.plan.recipe import Recipe
from streampack.plan.slots import ENDLESS, WalkState
from streampack.types import NO_SEGMENTS, NUM_COLUMNS, Int64Array

NUMBER_BYTES = 8


def _compressed(data: bytes, level: int = -1) -> str:
    return base64.b64encode(zlib.compress(data, level)).decode()


def _planes(numbers: Int64Array) -> bytes:
    """Return numbers byte by byte, because most of their higher bytes are equal."""
    little_endian = np.ascontiguousarray(numbers, "<i8")
    return little_endian.view(np.uint8).reshape(-1, NUMBER_BYTES).T.tobytes()


def _values(text: str) -> Int64Array:
    """Return the numbers whose `_planes` are compressed in a text, shape (n,)."""
    planes = zlib.decompress(base64.b64decode(text))
    rows = np.frombuffer(planes, np.uint8).reshape(NUMBER_BYTES, -1).T
    return np.ascontiguousarray(rows).view("<i8").ravel().astype(np.int64)


def walk_as_text(walk: WalkState) -> str:
    """Return the state of a walk in a compact form."""
    # Lanes get nearly the same of each stream, so differences between them are small.
    base = walk.served.min(axis=0)
    parts = [walk.turn, np.array([walk.slot, *walk.served.shape]), base]
    left = np.where(walk.limits < ENDLESS, walk.limits - walk.served, -1)
    parts += [(walk.served - base).ravel(), left.ravel()]
    if walk.schedule is not None:
        owed = walk.schedule.owed
        rounded = owed >> OWED_STEP
        parts += [np.array([walk.schedule.slot]), walk.schedule.lags, rounded.ravel()]
    return _compressed(_planes(np.concatenate(parts)), level=9)


def text_as_walk(text: str, recipe: Recipe, num_streams: int) -> WalkState:
    """Return the state of `walk_as_text`.

    `recipe` is of the state's chapter, and `num_streams` of the run that saved it.
    """
    lanes, queues = recipe.num_lanes, 1 if recipe.is_mixed else num_streams
    numbers = _values(text)
    base, deltas = numbers[8 : 8 + queues], numbers[8 + queues :]
    served = base + deltas[: lanes * queues].reshape(lanes, queues)
    left = deltas[lanes * queues : 2 * lanes * queues].reshape(lanes, queues)
    rest, schedule = deltas[2 * lanes * queues :], None
    if not recipe.is_mixed:
        lags, owed = rest[1 : 1 + queues], rest[1 + queues :].reshape(lanes, queues)
        schedule = ScheduleState(slot=int(rest[0]), lags=lags.copy(), owed=owed << OWED_STEP)
    return WalkState(
        slot=int(numbers[5]),
        served=served,
        turn=numbers[:5].copy(),
        schedule=schedule,
        limits=np.where(left < 0, ENDLESS, served + left),
    )


def rows_as_text(rows: Int64Array) -> str:
    """Return segment rows in a compact form; empty if there are none.

    >>> text_as_rows(rows_as_text(np.arange(12).reshape(2, 6))).tolist()
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    """
    if not len(rows):
        return ""
    # Column by column and byte by byte: most bytes are then zeros in a row.
    return _compressed(_planes(rows.T), level=1)


def text_as_rows(text: str) -> Int64Array:
    """Return the rows of `rows_as_text`."""
    if text == "":
        return NO_SEGMENTS
    return np.ascontiguousarray(_values(text).reshape(NUM_COLUMNS, -1).T)
