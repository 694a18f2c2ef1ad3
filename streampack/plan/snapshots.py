"""Validate the snapshots of a state against the recipe, before any of them is used.

::

    {"lane": 0, "queue": 0, "num_packs": 512, "dropped": [0, 3],
     "arrivals": [epoch, cursors, ...],                        as many as the queue's draw has
     "packer": {"method": "exact_fit", "high_water": [9, 2],
                "buffered": [[stream, pass, sample, start, length, total], ...]}}

A state may come from a damaged file or an untrusted source. The type, range and size of every value
are checked before use, and a violation raises ResumeError. Plausible integers that differ from the
saved ones cannot be detected; they only change the batches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from streampack._state import FieldChecks
from streampack.plan.recipe import Recipe
from streampack.plan.small_passes import small_pass
from streampack.plan.state_text import text_as_rows
from streampack.types import (
    LENGTH,
    NUM_COLUMNS,
    PASS,
    SAMPLE,
    START,
    STREAM,
    TOTAL,
    Int64Array,
    State,
)

CHECKS = FieldChecks(
    "the state's snapshots are damaged: ",
    "take 'snapshots' out of the state: they are only a speed-up",
)
MAX_INTEGER = 2**42  # packs or samples in any run; times the number of lanes they fit 64 bits
MAX_TOKENS = 2**62  # also for deficits, in fractions of a token
KEYS = {"lane", "queue", "num_packs", "arrivals", "packer", "dropped"}
RUN_KEYS = {"chapter", "begin", "begins", "undelivered"}
PACKER_KEYS = {"method", "buffered", "high_water"}
ALL_PACKER_KEYS = PACKER_KEYS | {"waited", "packs", "short", "items", "high_water_long"}


def check_run_snapshots(snapshots: Any, recipes: Sequence[Recipe], chapter: int) -> list[State]:
    """Return the snapshots of a state in a chapter of a run; an empty list if it has none.

    They are JSON text, or the parsed list. Raises a ResumeError if they are not of this run's pack
    queues.
    """
    checked = _with_keys(snapshots, KEYS | RUN_KEYS)
    # Once for all texts: chapters have the same streams.
    num_samples = np.array([stream.num_samples for stream in recipes[0].streams])
    for snapshot in checked:
        own = CHECKS.integer("chapter", snapshot["chapter"], 0, chapter)
        recipe = recipes[own]
        CHECKS.integer("begin", snapshot["begin"], 0, MAX_INTEGER)
        for begin in CHECKS.items("begins", snapshot["begins"], chapter - own):
            CHECKS.integer("begins", begin, 0, MAX_INTEGER)
        queue = _check_common(snapshot, recipe)
        num = 1 if not recipe.is_mixed else len(recipe.streams)
        values = CHECKS.items("arrivals", snapshot["arrivals"], 2 + 2 * num)
        for value in values:
            CHECKS.integer("arrivals", value, -MAX_TOKENS, MAX_TOKENS)
        for value in [values[0], *values[2 + num :]]:
            CHECKS.integer("arrivals", value, 0, MAX_INTEGER)
        streams = recipe.streams_in(queue)
        _check_packed("undelivered", snapshot["undelivered"], streams, num_samples)
    _check_distinct(checked)
    return checked


def _with_keys(snapshots: Any, keys: set[str]) -> list[State]:
    """Return snapshots as a list, after a check of their keys."""
    checked = parse_snapshots(snapshots)
    for snapshot in checked:
        if not isinstance(snapshot, dict) or snapshot.keys() != keys:
            raise CHECKS.error("one", snapshot, wanted=f"a dict of {sorted(keys)}")
    return checked


def _check_distinct(snapshots: Sequence[State]) -> None:
    counts = Counter((snapshot["lane"], snapshot["queue"]) for snapshot in snapshots)
    for (lane, queue), count in counts.items():
        if count > 1:
            raise CHECKS.failure(f"two are of lane {lane}, queue {queue}")


def _check_common(snapshot: State, recipe: Recipe) -> int:
    """Check what every snapshot has; return its queue."""
    CHECKS.integer("lane", snapshot["lane"], 0, recipe.num_lanes - 1)
    queue = CHECKS.integer("queue", snapshot["queue"], 0, recipe.num_queues - 1)
    CHECKS.integer("num_packs", snapshot["num_packs"], 0, MAX_INTEGER)
    for count in CHECKS.items("dropped", snapshot["dropped"], len(recipe.streams)):
        CHECKS.integer("dropped", count, 0, MAX_INTEGER)
    small = small_pass(recipe, snapshot["lane"], queue)
    method = small.packing.method if small else recipe.packing.method
    _check_packer(snapshot["packer"], recipe, queue, method)
    return queue


def parse_snapshots(snapshots: Any) -> list[State]:
    """Return snapshots as a list, or raise a ResumeError if the text is not JSON of one."""
    if snapshots is None:
        return []
    if isinstance(snapshots, str):
        try:
            snapshots = json.loads(snapshots)
        except (ValueError, RecursionError) as error:
            raise CHECKS.error("the text", snapshots, wanted=f"JSON ({error})") from error
    if not isinstance(snapshots, list):
        raise CHECKS.error("the value", snapshots, wanted="a list")
    return snapshots


def check_snapshots(snapshots: Any, recipe: Recipe, epoch: int) -> list[State]:
    """Return the snapshots of a state in an epoch of a recipe; see `check_run_snapshots`."""
    checked = _with_keys(snapshots, KEYS)
    for snapshot in checked:
        _check_common(snapshot, recipe)
        _check_arrivals(snapshot["arrivals"], recipe, epoch)
    _check_distinct(checked)
    return checked


def _check_arrivals(arrivals: Any, recipe: Recipe, epoch: int) -> None:
    """Check the epoch, and the integers of the recipe's kind of draw."""
    num = len(recipe.streams)
    by_tokens = recipe.is_mixed and recipe.mixing.weight_unit == "tokens"
    # Cursor and offset; or chunk and cursors; or deficits, and a cursor and offset per stream.
    length = 2 if not recipe.is_mixed else 3 * num if by_tokens else 1 + num
    values = CHECKS.items("arrivals", arrivals, 1 + length)
    # With carry, lanes may be planned several epochs ahead; small lanes many.
    first, last = (0, MAX_INTEGER) if recipe.mixing.epoch_end == "carry" else (epoch, epoch)
    CHECKS.integer("arrivals", values[0], first, last)
    num_deficits = num if by_tokens else 0
    for value in values[1 : 1 + num_deficits]:
        CHECKS.integer("arrivals", value, -MAX_TOKENS, MAX_TOKENS)
    for number, value in enumerate(values[1 + num_deficits :]):
        is_offset = number % 2 == 1 and (by_tokens or not recipe.is_mixed)
        CHECKS.integer("arrivals", value, 0, MAX_TOKENS if is_offset else MAX_INTEGER)


def _check_packer(packer: Any, recipe: Recipe, queue: int, method: str | None) -> None:
    if not isinstance(packer, dict) or not PACKER_KEYS <= packer.keys() <= ALL_PACKER_KEYS:
        raise CHECKS.error("packer", packer, wanted=f"a dict of {sorted(PACKER_KEYS)}")
    if not isinstance(packer["method"], str) or packer["method"] != method:
        raise CHECKS.error("packer.method", packer["method"], wanted=repr(method))
    for mark in CHECKS.items("high_water", packer["high_water"], 2):
        CHECKS.integer("high_water", mark, 0, MAX_INTEGER)
    num_rows = _check_rows("buffered", packer["buffered"], recipe, queue)
    packs = CHECKS.up_to("packs", packer.get("packs", []), num_rows)
    for size in packs:
        CHECKS.integer("packs", size, 1, num_rows)
    if "waited" in packer:
        # One entry per open pack, or per buffered sample if the method keeps no packs open.
        num_waiting = len(packs) if "packs" in packer else num_rows
        for waited in CHECKS.items("waited", packer["waited"], num_waiting):
            CHECKS.integer("waited", waited, 0, MAX_INTEGER)
    if "short" in packer:
        _check_packer(packer["short"], recipe, queue, "exact_fit")
    for item in CHECKS.up_to("items", packer.get("items", []), recipe.packing.buffer_samples):
        _check_rows("items", item, recipe, queue)
    CHECKS.integer("high_water_long", packer.get("high_water_long", 0), 0, MAX_INTEGER)


def _check_rows(name: str, rows: Any, recipe: Recipe, queue: int) -> int:
    """Check buffered segments, and return their number."""
    for row in CHECKS.up_to(name, rows, recipe.packing.buffer_samples):
        _check_row(CHECKS.items(name, row, NUM_COLUMNS), recipe, queue)
    return len(rows)


def _check_packed(name: str, text: Any, streams: Sequence[int], num_samples: Int64Array) -> None:
    """Check the text of segments of some streams."""
    if not isinstance(text, str):
        raise CHECKS.error(name, text, wanted="packed rows")
    rows = text_as_rows(text)
    if not len(rows):
        return
    is_right = np.isin(rows[:, STREAM], streams)
    samples = num_samples[np.where(is_right, rows[:, STREAM], 0)]
    starts, totals, lengths = rows[:, START], rows[:, TOTAL], rows[:, LENGTH]
    is_right &= (rows[:, PASS] >= 0) & (rows[:, PASS] <= MAX_INTEGER)
    is_right &= (rows[:, SAMPLE] >= 0) & (rows[:, SAMPLE] < samples)
    is_right &= (starts >= 0) & (starts < totals) & (totals <= MAX_INTEGER)
    is_right &= (lengths >= 1) & (lengths <= totals - starts)
    if not is_right.all():
        wrong = rows[np.argmin(is_right)].tolist()
        raise CHECKS.error(f"a row of {name}", wrong, wanted="a segment of this run")


def _check_row(row: list[Any], recipe: Recipe, queue: int) -> None:
    """Check one buffered segment."""
    numbers = recipe.streams_in(queue)
    stream = CHECKS.integer("a stream", row[STREAM], numbers[0], numbers[-1])
    CHECKS.integer("a pass", row[PASS], 0, MAX_INTEGER)
    CHECKS.integer("a sample", row[SAMPLE], 0, recipe.streams[stream].num_samples - 1)
    total = CHECKS.integer("a total", row[TOTAL], 1, MAX_INTEGER)
    start = CHECKS.integer("a start", row[START], 0, total - 1)
    longest = recipe.shapes.packings[queue].max_seq_len
    CHECKS.integer("a length", row[LENGTH], 1, min(total - start, longest))
