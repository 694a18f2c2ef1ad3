"""A place of a walk over slots as text, small enough for every state.

::

    counts by lane and column, limits, lags, debts  -->  bytes of equal weight together, compressed

Cost: O(streams x lanes): 10 KB for 100 streams and 64 lanes.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from streampack._state import UNCHANGED, FieldChecks
from streampack.mix import SchedulePlace
from streampack.mix.schedule import OWED_STEP
from streampack.plan.recipe import Recipe
from streampack.plan.slots import ENDLESS, WalkPlace

CHECKS = FieldChecks("the state's ", UNCHANGED)


def place_as_text(place: WalkPlace) -> str:
    """Return a place of a walk in a compact form."""
    # Lanes get nearly the same of each stream, so differences between them are small.
    base = place.served.min(axis=0)
    parts = [place.turn, np.array([place.slot, *place.served.shape]), base]
    left = np.where(place.limits < ENDLESS, place.limits - place.served, -1)
    parts += [(place.served - base).ravel(), left.ravel()]
    if place.schedule is not None:
        owed = place.schedule.owed
        rounded = owed >> OWED_STEP
        parts += [np.array([place.schedule.slot]), place.schedule.lags, rounded.ravel()]
    numbers = np.concatenate(parts).astype("<i8")
    # Byte by byte: most of the higher bytes are equal.
    planes = numbers.view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b64encode(zlib.compress(planes, 9)).decode()


def text_as_place(text: Any, recipe: Recipe, num_streams: int) -> WalkPlace | None:
    """Return the place of `place_as_text`; None if there is none.

    Args:
        text: The state's value.
        recipe: The recipe of the state's chapter.
        num_streams: Streams of the run that saved it.

    Raises:
        ResumeError: If the text is not of a place in such a run.
    """
    if not text:
        return None
    lanes, columns = recipe.num_lanes, 1 if recipe.is_mixed else num_streams
    try:
        planes = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), np.uint8)
        numbers = np.ascontiguousarray(planes.reshape(8, -1).T).view("<i8").ravel().astype(np.int64)
        turn, slot, shape = numbers[:5], int(numbers[5]), tuple(numbers[6:8].tolist())
        base, deltas = numbers[8 : 8 + columns], numbers[8 + columns :]
        served = base + deltas[: lanes * columns].reshape(lanes, columns)
        left = deltas[lanes * columns : 2 * lanes * columns].reshape(lanes, columns)
        rest = deltas[2 * lanes * columns :]
        if shape != (lanes, columns) or slot < 0 or (served < 0).any():
            raise ValueError(f"it is of {shape} lanes and columns")
        schedule = None
        if not recipe.is_mixed:
            lags, owed = rest[1 : 1 + columns], rest[1 + columns :].reshape(lanes, columns)
            schedule = SchedulePlace(slot=int(rest[0]), lags=lags.copy(), owed=owed << OWED_STEP)
    except (TypeError, ValueError, IndexError, zlib.error) as error:
        raise CHECKS.error("walk", text, wanted=f"a place of this run ({error})") from error
    limits = np.where(left < 0, ENDLESS, served + left)
    return WalkPlace(slot=slot, served=served, turn=turn.copy(), schedule=schedule, limits=limits)
