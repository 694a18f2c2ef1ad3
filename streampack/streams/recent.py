"""The shards that a process has open, the oldest used let go first.

::

    get(key) --> shard            put(key, shard) --> [oldest used] ... [latest used]
                                                       '-- let go, once there are too many

Memory maps are kept per process, all streams together, because each holds one of the files that a
process may have open. Shards whose files were removed to make room are let go at the next opening.

Cost: 16 bytes a sample and column, at most 4 million samples; one lock per opening, and under a
cache limit a `stat` for each open shard.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from streampack.streams.mds import ByteArray, Places

__all__ = ["OpenShard", "RecentShards", "recent_shards"]

MAX_OPEN_SHARDS = 512  # each keeps one file open, of the 1,024 that a process usually may
MAX_OPEN_SAMPLES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenShard:
    """One shard's bytes, and where its values lie in them."""

    data: ByteArray
    """The raw shard, mapped from its file, shape (num_bytes,)."""
    tokens: Places
    """Places of the tokens."""
    labels: Places | None
    """Places of the labels, if there is such a column."""
    loss_mask: Places | None
    """Places of the loss mask, if there is such a column."""
    is_gone: Callable[[], bool] | None = None
    """Tells whether its file was removed to make room, which it gives back only once nobody has the
    shard open; None: files stay where this one lies."""


class RecentShards:
    """The shards that one process has open, all streams together; the oldest used is let go first.

    Args:
        max_shards: How many may be open.
        max_samples: How many samples they may hold together.
    """

    def __init__(self, max_shards: int, max_samples: int) -> None:
        self._max_shards = max_shards
        self._max_samples = max_samples
        self._shards: OrderedDict[Hashable, OpenShard] = OrderedDict()
        self._num_samples = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, key: Hashable) -> OpenShard | None:
        """Return an open shard, if it is one."""
        with self._lock:
            shard = self._shards.get(key)
            if shard is not None:
                self._shards.move_to_end(key)
            return shard

    def put(self, key: Hashable, shard: OpenShard) -> None:
        """Keep a shard open; its file is closed once nobody uses it any more."""
        with self._lock:
            if key in self._shards:
                return
            self._let_go_of_removed()
            self._shards[key] = shard
            self._num_samples += len(shard.tokens.counts)
            while len(self._shards) > 1 and (
                len(self._shards) > self._max_shards or self._num_samples > self._max_samples
            ):
                _, oldest = self._shards.popitem(last=False)
                self._num_samples -= len(oldest.tokens.counts)

    def _let_go_of_removed(self) -> None:
        for key, shard in list(self._shards.items()):
            if shard.is_gone is not None and shard.is_gone():
                del self._shards[key]
                self._num_samples -= len(shard.tokens.counts)


_recent_shards: dict[int, RecentShards] = {}


def recent_shards() -> RecentShards:
    """Return this process's open shards."""
    # Keyed by process: after a fork, the parent's lock may be held by a thread that is not here.
    pid = os.getpid()
    own = _recent_shards.get(pid)
    if own is None:
        # Several threads may come here at once: all of them take the one that was put first.
        own = _recent_shards.setdefault(pid, RecentShards(MAX_OPEN_SHARDS, MAX_OPEN_SAMPLES))
        for other in list(_recent_shards):
            if other != pid:
                _recent_shards.pop(other, None)
    return own
