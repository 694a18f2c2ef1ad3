"""The snapshots in a state, each with a digest: one that is damaged is dropped.

::

    {"lane": 0, "queue": 0, "num_packs": 512, "dropped": [0, 3],
     "arrivals": [epoch, cursors, ...],                        as many as the queue's draw has
     "packer": {"method": "exact_fit", "high_water": [9, 2],
                "buffered": [[stream, pass, sample, start, length, total], ...]},
     "digest": "5f2c..."}                                      of all this, and of the state

Snapshots only save time, so without one its lane is planned from its start. The digest covers what
the snapshot was made for, too: the run, the epoch and the position. So it finds damage, and
snapshots of another state. It is not a signature: a forged state can
have valid digests.

Cost: about 2 us a KB.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from hashlib import blake2b

from streampack._state import as_text
from streampack.types import State

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
    """Return the text of a state's walk; "" where there is none. Warn if it is damaged."""
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
    text = as_text({key: state.get(key) for key in PLACE})
    return blake2b(text.encode(), digest_size=32).digest()


def _digest(place: bytes, text: str) -> str:
    return blake2b(text.encode(), key=place, digest_size=8).hexdigest()
