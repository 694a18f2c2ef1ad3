"""Parts of a state as text, small enough for every state.

::

    the state of a walk  counts by lane and queue, limits, ...  -->  bytes of equal weight together
    segments             rows                                    -->  columns, as differences

Both are compressed. Text from a damaged file is unpacked to a limited size only.

Cost: O(streams x lanes) a walk: 10 KB for 100 streams and 64 lanes. O(segments) for others.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from streampack._state import UNCHANGED, FieldChecks
from streampack.mix import ScheduleState
from streampack.mix.schedule import OWED_STEP
from streampack.plan.recipe import Recipe
from streampack.plan.slots import ENDLESS, WalkState
from streampack.types import NO_SEGMENTS, NUM_COLUMNS, Int64Array

CHECKS = FieldChecks("the state's ", UNCHANGED)
MAX_ROWS = 1 << 22  # segments of a queue that wait to be packed; two windows are far fewer
NUMBER_BYTES = 8


def _compressed(data: bytes, level: int = -1) -> str:
    return base64.b64encode(zlib.compress(data, level)).decode()


def _decompressed(text: str, most_numbers: int) -> bytes:
    """Return the data of `_compressed`, which must hold at most so many numbers of 8 bytes."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), most_numbers * NUMBER_BYTES)
    if not unpacker.eof:
        raise ValueError(f"it is cut off, or holds more than {most_numbers} numbers")
    return data


def _planes(numbers: Int64Array) -> bytes:
    """Return numbers byte by byte, because most of their higher bytes are equal."""
    little_endian = np.ascontiguousarray(numbers, "<i8")
    return little_endian.view(np.uint8).reshape(-1, NUMBER_BYTES).T.tobytes()


def _values(planes: bytes) -> Int64Array:
    """Return the numbers of `_planes`, shape (n,)."""
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


def text_as_walk(text: Any, recipe: Recipe, num_streams: int) -> WalkState | None:
    """Return the state of `walk_as_text`; None if there is none.

    `recipe` is of the state's chapter, and `num_streams` of the run that saved it. Raises a
    ResumeError if the text is not of a walk in such a run.
    """
    if not text:
        return None
    lanes, queues = recipe.num_lanes, 1 if recipe.is_mixed else num_streams
    try:
        most = 16 + 4 * (lanes + 1) * queues
        numbers = _values(_decompressed(text, most))
        turn, slot, shape = numbers[:5], int(numbers[5]), tuple(numbers[6:8].tolist())
        base, deltas = numbers[8 : 8 + queues], numbers[8 + queues :]
        served = base + deltas[: lanes * queues].reshape(lanes, queues)
        left = deltas[lanes * queues : 2 * lanes * queues].reshape(lanes, queues)
        rest = deltas[2 * lanes * queues :]
        if shape != (lanes, queues) or slot < 0 or (served < 0).any():
            raise ValueError(f"it is of {shape} lanes and queues")
        # Streams that were removed have no queue of this run.
        _check_turn(turn, recipe, min(queues, recipe.num_queues))
        schedule = None
        if not recipe.is_mixed:
            chosen = int(rest[0])
            if not 0 <= chosen <= slot:
                raise ValueError(f"its schedule stands at {chosen}, after slot {slot}")
            lags, owed = rest[1 : 1 + queues], rest[1 + queues :].reshape(lanes, queues)
            schedule = ScheduleState(slot=chosen, lags=lags.copy(), owed=owed << OWED_STEP)
    except (TypeError, ValueError, IndexError, zlib.error) as error:
        raise CHECKS.error("walk", text, wanted=f"a walk of this run ({error})") from error
    limits = np.where(left < 0, ENDLESS, served + left)
    return WalkState(slot=slot, served=served, turn=turn.copy(), schedule=schedule, limits=limits)


def _check_turn(turn: Int64Array, recipe: Recipe, num_queues: int) -> None:
    """Check the cursor of a walk: compiled code uses its lane and its queues as indices.

    A queue that is not in use is never read, and may be any number.
    """
    lane, left, chosen, holds, serving = turn.tolist()
    is_whole = recipe.mixing.batching_method == "per_stream"
    used = [chosen] if is_whole and holds else []
    used += [serving] if left and left < recipe.shapes.run else []
    if (
        not 0 <= lane < recipe.num_lanes
        or not 0 <= left <= recipe.lane_run
        or (is_whole and not 0 <= holds <= recipe.global_batch_size)
        or not all(0 <= queue < num_queues for queue in used)
    ):
        raise ValueError(f"its cursor {turn.tolist()} lies outside of the run")


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
    values = _values(_decompressed(text, MAX_ROWS * NUM_COLUMNS))
    return np.ascontiguousarray(values.reshape(NUM_COLUMNS, -1).T)
