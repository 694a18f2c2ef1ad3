"""The shard pool: an LRU cache of the shards that a process has open.

::

    get(key) --> shard            put(key, shard) --> [least recent] ... [most recent]
                                                       '-- closed, once there are too many

Memory maps are kept per process, for all streams together; they hold no file descriptor. Shards
whose files were evicted are closed the next time a shard is opened.

Cost: 16 bytes per sample and column, at most 4 million samples; one lock per opening, and under a
cache limit a `stat` for each open shard.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from streampack.mds.columns import ByteArray, Places

MAX_OPEN_SHARDS = 512  # mappings, which hold no file descriptor
MAX_OPEN_SAMPLES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenShard:
    """One shard's bytes, and the positions of its values."""

    data: ByteArray
    """The raw shard, mapped from its file, shape (num_bytes,)."""
    tokens: Places
    """Positions of the tokens."""
    labels: Places | None
    """Positions of the labels, if there is such a column."""
    loss_mask: Places | None
    """Positions of the loss mask, if there is such a column."""
    is_gone: Callable[[], bool] | None = None
    """Returns whether its file was evicted; None: files in its folder are never evicted. The disk
    space is freed only once no process has the shard open.
    """


class ShardPool:
    """An LRU cache of one process's open shards, for all streams together.

    Args:
        max_shards: Maximum number of open shards.
        max_samples: Maximum number of samples that they may hold together.
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
        """Return an open shard and mark it as most recently used; None if it is not open."""
        with self._lock:
            shard = self._shards.get(key)
            if shard is not None:
                self._shards.move_to_end(key)
            return shard

    def put(self, key: Hashable, shard: OpenShard) -> None:
        """Add a shard; its mapping is released after eviction, once no array refers to it."""
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


_recent_shards: dict[int, ShardPool] = {}


def shard_pool() -> ShardPool:
    """Return this process's shard pool."""
    # Keyed by process: after a fork, the parent's lock may be held by a thread that is not here.
    pid = os.getpid()
    own = _recent_shards.get(pid)
    if own is None:
        # Several threads may get here concurrently: all of them use the pool that was stored first.
        own = _recent_shards.setdefault(pid, ShardPool(MAX_OPEN_SHARDS, MAX_OPEN_SAMPLES))
        for other in list(_recent_shards):
            if other != pid:
                _recent_shards.pop(other, None)
    return own
