"""Fit the state of a run of chapters to streams that were added or removed.

::

    state       0 web   1 code  2 math
    dataset     0 web   1 more  2 code          a queue, a cursor, a segment of code: 1 --> 2

Streams are known by name. One that was removed never had a share, so nothing in the state is of it.

Cost: O(snapshots).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from streampack.plan.slots import WalkState
from streampack.plan.state_text import rows_as_text, text_as_rows
from streampack.types import STREAM, State


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
