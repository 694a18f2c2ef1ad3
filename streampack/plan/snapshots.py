"""The snapshots in a state: as text, with a digest, and with the numbers of a run.

::

    {"lane": 0, "queue": 0, "num_packs": 512, "dropped": [0, 3],
     "arrivals": [epoch, chunk, dues, cursors, offsets],   as many as the queue has streams
     "packer": {"method": "next_fit", "high_water": [9, 2],
                "buffered": [[stream, pass, sample, start, length, total], ...]},
     "digest": "5f2c..."}                                           of all this, and of the state

They only save time. The digest also covers what they were made for: the run, the epoch and the
position. Damaged ones and those of another state are dropped with a warning. It is not a signature.

In a run of chapters, streams are known by name, so that a dataset may add or remove some that had
no share::

    state       0 web   1 code  2 math
    dataset     0 web   1 more  2 code          a queue, a cursor, a segment of code: 1 --> 2

Cost: about 2 us a KB.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import numpy as np

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


def _as_json(value: State) -> str:
    return json.dumps(value, separators=(",", ":"))


def _place(state: State) -> bytes:
    text = json.dumps({key: state.get(key) for key in PLACE}, sort_keys=True)
    return blake2b(text.encode(), digest_size=32).digest()


def _digest(place: bytes, text: str) -> str:
    return blake2b(text.encode(), key=place, digest_size=8).hexdigest()


def rows_as_text(rows: Int64Array) -> str:
    """Return segment rows in a compact form; empty if there are none.

    >>> text_as_rows(rows_as_text(np.arange(12).reshape(2, 6))).tolist()
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    """
    if not len(rows):
        return ""
    # Column by column and byte by byte: most bytes are then zeros in a row.
    columns = np.ascontiguousarray(rows.T, "<i8")
    planes = columns.view(np.uint8).reshape(-1, NUMBER_BYTES).T.tobytes()
    return base64.b64encode(zlib.compress(planes, level=1)).decode()


def text_as_rows(text: str) -> Int64Array:
    """Return the rows of `rows_as_text`."""
    if text == "":
        return NO_SEGMENTS
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    values = np.ascontiguousarray(planes.reshape(NUMBER_BYTES, -1).T).view("<i8").astype(np.int64)
    return np.ascontiguousarray(values.reshape(NUM_COLUMNS, -1).T)


class Arrivals(NamedTuple):
    """The columns of a snapshot's "arrivals": the positions of a queue's samples.

    >>> Arrivals.read([2, 1, 8, 9, 30, 40, 5, 6]).cursors
    [30, 40]
    """

    epoch: int
    chunk: int
    """The next chunk; by tokens 0 before the first draw of an epoch or chapter, and then 1."""
    dues: list[int]
    """What each stream is due, like what follows."""
    cursors: list[int]
    offsets: list[int]

    @classmethod
    def read(cls, values: Sequence[int]) -> Self:
        """Return the columns of a list."""
        epoch, chunk, *columns = map(int, values)
        num = len(columns) // 3
        return cls(epoch, chunk, columns[:num], columns[num : 2 * num], columns[2 * num :])

    def as_list(self) -> list[int]:
        """Return the list that a snapshot has."""
        return [self.epoch, self.chunk, *self.dues, *self.cursors, *self.offsets]


def renumbered(
    snapshots: Sequence[State], before: Sequence[str], after: Sequence[str], *, is_mixed: bool
) -> list[State]:
    """Return snapshots of streams with these names, numbered as they are in another list."""
    new = [after.index(name) if name in after else -1 for name in before]

    def of_streams(values: Sequence[Any]) -> list[Any]:
        by_name = dict(zip(before, values, strict=True))
        return [by_name.get(name, 0) for name in after]

    def of_snapshot(snapshot: State) -> State:
        rows, packer = text_as_rows(snapshot["undelivered"]), snapshot["packer"]
        rows[:, STREAM] = [new[stream] for stream in rows[:, STREAM].tolist()]
        changed = snapshot | {
            "dropped": of_streams(snapshot["dropped"]),
            "packer": packer
            | {"buffered": [[new[row[STREAM]], *row[1:]] for row in packer["buffered"]]},
            "undelivered": rows_as_text(rows),
        }
        if not is_mixed:
            return changed | {"queue": new[snapshot["queue"]]}
        epoch, chunk, *columns = Arrivals.read(snapshot["arrivals"])
        arrivals = Arrivals(epoch, chunk, *map(of_streams, columns))
        return changed | {"arrivals": arrivals.as_list()}

    return [each for each in map(of_snapshot, snapshots) if each["queue"] >= 0]
