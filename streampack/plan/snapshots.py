"""Validate the snapshots of a state against the recipe, before any of them is used.

::

    {"lane": 0, "column": 0, "num_packs": 512, "overlong": [0, 3],
     "arrivals": [epoch, cursors, ...],                        as many as the column's draw has
     "packer": {"method": "exact_fit", "high_water": [9, 2],
                "buffered": [[stream, pass, sample, start, length, total], ...]}}

A state may come from a damaged file or an untrusted source. The type, range and size of every value
are checked before use, and a violation raises ResumeError. Plausible integers that differ from the
saved ones cannot be detected; they only change the batches.

Cost: about 1 us an integer.
"""

from __future__ import annotations

import json
from typing import Any

from streampack.errors import ResumeError
from streampack.plan.recipe import Recipe
from streampack.types import LENGTH, NUM_COLUMNS, PASS, SAMPLE, START, STREAM, TOTAL, State

MAX_INTEGER = 2**42  # packs or samples in any run; times the number of lanes they fit 64 bits
MAX_TOKENS = 2**62  # also for deficits, in fractions of a token
KEYS = {"lane", "column", "num_packs", "arrivals", "packer", "overlong"}
PACKER_KEYS = {"method", "buffered", "high_water"}
ALL_PACKER_KEYS = PACKER_KEYS | {"waited", "packs", "short", "items", "high_water_long"}


def check_snapshots(snapshots: Any, recipe: Recipe, epoch: int) -> list[State]:
    """Return the snapshots of a state; an empty list if it has none.

    Args:
        snapshots: The state's value: JSON text, or the parsed list.
        recipe: Determines the sequence.
        epoch: The state's epoch.

    Raises:
        ResumeError: If they are not snapshots of this recipe's pack queues.
    """
    if snapshots is None:
        return []
    if isinstance(snapshots, str):
        try:
            snapshots = json.loads(snapshots)
        except (ValueError, RecursionError) as error:
            raise _damaged(f"they are no JSON ({error})") from error
    if not isinstance(snapshots, list):
        raise _damaged(f"they are {snapshots!r:.80}, no list")
    seen = set()
    for snapshot in snapshots:
        if not isinstance(snapshot, dict) or snapshot.keys() != KEYS:
            raise _damaged(f"one is {snapshot!r:.80}, which is not what was saved")
        place = (
            _check("lane", snapshot["lane"], 0, recipe.num_lanes - 1),
            _check("column", snapshot["column"], 0, recipe.num_columns - 1),
        )
        if place in seen:
            raise _damaged(f"two are of lane {place[0]}, column {place[1]}")
        seen.add(place)
        _check("num_packs", snapshot["num_packs"], 0, MAX_INTEGER)
        for count in _list("overlong", snapshot["overlong"], len(recipe.streams)):
            _check("overlong", count, 0, MAX_INTEGER)
        _check_arrivals(snapshot["arrivals"], recipe, epoch)
        _check_packer(snapshot["packer"], recipe, place[1], recipe.packing.method)
    return snapshots


def _damaged(what: str) -> ResumeError:
    return ResumeError(
        f"the state's snapshots are damaged: {what}; take 'snapshots' out of the state: they are "
        "only a speed-up"
    )


def _check(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _damaged(f"{name} is {value!r:.80}, not an integer from {least} to {most}")
    return value


def _list(name: str, value: Any, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise _damaged(f"{name} is {value!r:.80}, no list of {length}")
    return value


def _check_arrivals(arrivals: Any, recipe: Recipe, epoch: int) -> None:
    """Check the epoch, and the integers of the recipe's kind of draw."""
    num = len(recipe.streams)
    by_tokens = recipe.is_mixed and recipe.mixing.weight_unit == "tokens"
    # Cursor and offset; or chunk and cursors; or deficits, and a cursor and offset per stream.
    length = 2 if not recipe.is_mixed else 3 * num if by_tokens else 1 + num
    values = _list("arrivals", arrivals, 1 + length)
    is_carry = recipe.mixing.epoch_end == "carry"
    # With carry, lanes may be planned several epochs ahead; small lanes many.
    _check("arrivals", values[0], 0 if is_carry else epoch, MAX_INTEGER if is_carry else epoch)
    num_deficits = num if by_tokens else 0
    for value in values[1 : 1 + num_deficits]:
        _check("arrivals", value, -MAX_TOKENS, MAX_TOKENS)
    for number, value in enumerate(values[1 + num_deficits :]):
        is_offset = number % 2 == 1 and (by_tokens or not recipe.is_mixed)
        _check("arrivals", value, 0, MAX_TOKENS if is_offset else MAX_INTEGER)


def _check_packer(packer: Any, recipe: Recipe, column: int, method: str) -> None:
    if not isinstance(packer, dict) or not PACKER_KEYS <= packer.keys() <= ALL_PACKER_KEYS:
        raise _damaged(f"packer is {packer!r:.80}, which is not what was saved")
    if not isinstance(packer["method"], str) or packer["method"] != method:
        raise _damaged(f"packer is of method {packer['method']!r:.80}")
    for mark in _list("high_water", packer["high_water"], 2):
        _check("high_water", mark, 0, MAX_INTEGER)
    num_rows = _check_rows("buffered", packer["buffered"], recipe, column)
    packs = _up_to("packs", packer.get("packs", []), num_rows)
    for size in packs:
        _check("packs", size, 1, num_rows)
    if "waited" in packer:
        # One entry per open pack, or per buffered sample if the method keeps no packs open.
        num_waiting = len(packs) if "packs" in packer else num_rows
        for waited in _list("waited", packer["waited"], num_waiting):
            _check("waited", waited, 0, MAX_INTEGER)
    if "short" in packer:
        _check_packer(packer["short"], recipe, column, "exact_fit")
    for item in _up_to("items", packer.get("items", []), recipe.packing.buffer_samples):
        _check_rows("items", item, recipe, column)
    _check("high_water_long", packer.get("high_water_long", 0), 0, MAX_INTEGER)


def _up_to(name: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise _damaged(f"{name} is {value!r:.80}, no list of at most {most}")
    return value


def _check_rows(name: str, rows: Any, recipe: Recipe, column: int) -> int:
    """Check buffered segments, and return their number."""
    for row in _up_to(name, rows, recipe.packing.buffer_samples):
        _check_row(_list(name, row, NUM_COLUMNS), recipe, column)
    return len(rows)


def _check_row(row: list[Any], recipe: Recipe, column: int) -> None:
    """Check one buffered segment."""
    last = len(recipe.streams) - 1
    first_stream, last_stream = (0, last) if recipe.is_mixed else (column, column)
    stream = _check("a stream", row[STREAM], first_stream, last_stream)
    _check("a pass", row[PASS], 0, MAX_INTEGER)
    _check("a sample", row[SAMPLE], 0, recipe.streams[stream].num_samples - 1)
    total = _check("a total", row[TOTAL], 1, MAX_INTEGER)
    start = _check("a start", row[START], 0, total - 1)
    _check("a length", row[LENGTH], 1, min(total - start, recipe.packing.max_seq_len))
