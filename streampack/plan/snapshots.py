"""The snapshots and the walk in a state: as text, with a digest, and with the numbers of a run.

::

    {"lane": 0, "queue": 0, "num_packs": 512, "dropped": [0, 3],
     "arrivals": [epoch, chunk, yielded, dues, cursors, offsets],   as many as the queue has streams
     "packer": {"method": "exact_fit", "high_water": [9, 2],
                "buffered": [[stream, pass, sample, start, length, total], ...]},
     "digest": "5f2c..."}                                           of all this, and of the state

Both only save time. The digest also covers what they were made for: the run, the epoch and the
position. Damaged ones and those of another state are dropped with a warning. It is not a signature.

In a run of chapters, streams are known by name, so that a dataset may add or remove some that had
no share::

    state       0 web   1 code  2 math
    dataset     0 web   1 more  2 code          a queue, a cursor, a segment of code: 1 --> 2

Cost: about 2 us a KB. A walk is O(streams x lanes): 10 KB for 100 streams and 64 lanes.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np

from streampack._state import canonical_json
from streampack.mix.schedule import OWED_STEP, ScheduleState
from streampack.plan.recipe import Recipe
from streampack.plan.slots import ENDLESS, WalkState
from streampack.types import NO_SEGMENTS, NUM_COLUMNS, STREAM, Int64Array, State

NUMBER_BYTES = 8
MAX_INTEGER = 2**42  # packs or samples in any run; times the number of lanes they fit 64 bits
# What snapshots are made for, in states of runs with epochs and of chapters.
PLACE = (
    "version",
    "epoch",
    "position",
    "num_lanes",
    "lane_run",
    "global_batch_size",
    "fingerprint",
    "streams",
    "chapters",
)

logger = logging.getLogger(__name__)


def with_snapshots(state: State, snapshots: Sequence[State]) -> State:
    """Return a state with snapshots, as one JSON text."""
    place = _place(state)
    texts = []
    for snapshot in snapshots:
        text = _as_json(snapshot)
        texts.append(f'{text[:-1]},"digest":"{_digest(place, text)}"}}')
    return state | {"snapshots": f"[{','.join(texts)}]"}


def snapshots_in(state: State) -> list[State]:
    """Return the snapshots of a state; warn of those that are damaged, and drop them."""
    saved, place = state.get("snapshots", "[]"), _place(state)
    intact: list[State] = []
    try:
        parsed = json.loads(saved) if isinstance(saved, str) else saved
        for each in parsed:
            snapshot = dict(each)
            if snapshot.pop("digest") == _digest(place, _as_json(snapshot)):
                intact.append(snapshot)
        num_lost = len(parsed) - len(intact)
    except (KeyError, TypeError, ValueError, RecursionError):
        intact, num_lost = [], -1
    if num_lost:
        logger.warning(
            "%s of the state's snapshots are damaged, or of another state: the lanes without one "
            "are planned from their start, which takes longer and gives the same batches",
            "all" if num_lost < 0 else num_lost,
        )
    return intact


def with_walk(state: State, text: str) -> State:
    """Return a state with the text of a walk, which has a digest like snapshots; "": none."""
    return state | {"walk": text and f"{_digest(_place(state), text)}:{text}"}


def walk_in(state: State) -> str:
    """Return the text of a state's walk, or "". Warn if it is damaged."""
    saved = state.get("walk", "")
    digest, _, text = saved.partition(":") if isinstance(saved, str) else ("", "", "")
    if saved == "" or digest == _digest(_place(state), text):
        return text
    logger.warning(
        "the state's walk is damaged, or of another state: the run is walked from its start, "
        "which takes longer and gives the same batches"
    )
    return ""


def _as_json(value: State) -> str:
    return json.dumps(value, separators=(",", ":"))


def _place(state: State) -> bytes:
    text = canonical_json({key: state.get(key) for key in PLACE})
    return blake2b(text.encode(), digest_size=32).digest()


def _digest(place: bytes, text: str) -> str:
    return blake2b(text.encode(), key=place, digest_size=8).hexdigest()


def _compressed(data: bytes, level: int = -1) -> str:
    return base64.b64encode(zlib.compress(data, level)).decode()


def _planes(numbers: Int64Array) -> bytes:
    """Return numbers byte by byte, because most of their higher bytes are equal."""
    little_endian = np.ascontiguousarray(numbers, "<i8")
    return little_endian.view(np.uint8).reshape(-1, NUMBER_BYTES).T.tobytes()


def _values(text: str) -> Int64Array:
    """Return the numbers from their compressed `_planes`, shape (n,)."""
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


class Renumbering:
    """New numbers of streams, from the names of the state's and those of the dataset's."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        self._before = list(before)
        self._new = [after.index(name) if name in after else -1 for name in before]
        self._num_after = len(after)
        self.is_needed = list(before) != list(after)

    def snapshots(self, snapshots: Sequence[State], *, is_mixed: bool) -> list[State]:
        """Return snapshots with the new numbers."""
        renumbered = [self._snapshot(snapshot, is_mixed) for snapshot in snapshots]
        return [snapshot for snapshot in renumbered if snapshot["queue"] >= 0]

    def _snapshot(self, snapshot: State, is_mixed: bool) -> State:
        new = dict(snapshot)
        if not is_mixed:
            new["queue"] = self._new[snapshot["queue"]]
        else:
            # Epoch, chunk and draws that gave way; dues, cursors and offsets, one for each stream.
            first, values = snapshot["arrivals"][:3], snapshot["arrivals"][3:]
            num = len(self._before)
            parts = [self._values(values[n * num : (n + 1) * num]) for n in range(3)]
            new["arrivals"] = [*first, *chain.from_iterable(parts)]
        new["dropped"] = self._values(snapshot["dropped"])
        new["packer"] = self._packer(snapshot["packer"])
        rows = text_as_rows(snapshot["undelivered"])
        rows[:, STREAM] = [self._new[stream] for stream in rows[:, STREAM].tolist()]
        new["undelivered"] = rows_as_text(rows)
        return new

    def _packer(self, packer: State) -> State:
        new = dict(packer)
        new["buffered"] = self._rows(packer["buffered"])
        if "items" in packer:
            new["items"] = [self._rows(item) for item in packer["items"]]
        if "short" in packer:
            new["short"] = self._packer(packer["short"])
        return new

    def _rows(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[self._new[row[STREAM]], *row[STREAM + 1 :]] for row in rows]

    def _values(self, values: Sequence[Any]) -> list[Any]:
        """Return a value for each stream; 0 for new ones."""
        new = [0] * self._num_after
        for number, value in zip(self._new, values, strict=True):
            if number >= 0:
                new[number] = value
        return new

    def walk(self, walk: WalkState, unused: WalkState, ran: Collection[str]) -> WalkState:
        """Return a walk with the new numbers.

        `unused` is one with the new numbers at which no stream was used yet. `ran` are the
        names of streams that were used before it.
        """
        if walk.schedule is None or unused.schedule is None:
            return walk
        old = [number for number, name in enumerate(self._before) if name in ran]
        new = [self._new[number] for number in old]
        served, limits = unused.served.copy(), unused.limits.copy()
        lags, owed = unused.schedule.lags.copy(), unused.schedule.owed.copy()
        served[:, new], limits[:, new] = walk.served[:, old], walk.limits[:, old]
        lags[new], owed[:, new] = walk.schedule.lags[old], walk.schedule.owed[:, old]
        schedule = replace(walk.schedule, lags=lags, owed=owed)
        return replace(walk, served=served, schedule=schedule, limits=limits)
