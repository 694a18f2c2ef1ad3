"""The shard pool: an LRU cache of the shards that a process has open.

::

    get(key) --> shard      put(shard), touch(shards) --> [least recent] ... [most recent]
                                                          '-- closed, once there are too many

Memory maps are kept per process, for all streams together. A gatherer keeps the address rows of the
shards that it reads (gather/mapped_shards.py), and reports their use before it opens another one.
Shards whose files were evicted are closed the next time a shard is opened.

Cost: 16 bytes per sample and column, as much again for a gatherer's address rows, for at most 3
million samples. One lock per opening, and under a cache limit a `stat` for each open shard.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from streampack.mds.columns import Spans
from streampack.types import ByteArray, Int64Array

MAX_OPEN_SHARDS = 512  # mappings, which hold no file descriptor
MAX_OPEN_SAMPLES = 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenShard:
    """One shard's bytes, and the positions of its values."""

    key: Hashable
    """Identifies the version of the shard's file, and the columns that are read."""
    uri: str
    data: ByteArray
    """The raw shard, mapped from its file, shape (num_bytes,)."""
    tokens: Spans
    labels: Spans | None
    loss_mask: Spans | None
    mask_data: ByteArray | None = None
    """The bytes that `loss_mask` is about, if not those of `data`."""
    first_targets: Int64Array | None = None
    """The place of the first target of each sample, if they are conversations; shape (n,)."""
    is_gone: Callable[[], bool] | None = None
    """Returns whether the shard's file was evicted. None: files in its folder are never evicted.
    The disk space is freed only once no process has the shard open.
    """

    def take(self, samples: Int64Array) -> OpenShard:
        """Return the shard with these of its samples alone, shape (n,)."""
        columns = {name: getattr(self, name) for name in ("tokens", "labels", "loss_mask")}
        taken = {name: spans.take(samples) for name, spans in columns.items() if spans is not None}
        targets = self.first_targets
        return replace(self, **taken, first_targets=None if targets is None else targets[samples])


class ShardPool:
    """An LRU cache of one process's open shards, limited in number and in total samples."""

    def __init__(self, max_shards: int, max_samples: int) -> None:
        self._max_shards = max_shards
        self._max_samples = max_samples
        self.clear()

    def clear(self) -> None:
        """Close all shards. The lock is new: in a fork, one of the parent's threads may hold it."""
        self._shards: OrderedDict[Hashable, OpenShard] = OrderedDict()
        self._num_samples = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._shards

    def get(self, key: Hashable) -> OpenShard | None:
        """Return an open shard and mark it as most recently used; None if it is not open."""
        with self._lock:
            shard = self._shards.get(key)
            if shard is not None:
                self._shards.move_to_end(key)
            return shard

    def put(self, shard: OpenShard) -> None:
        """Add a shard. Once it is closed, its mapping is released with the last array in it."""
        with self._lock:
            for other in list(self._shards.values()):
                if other.is_gone is not None and other.is_gone():
                    self._remove(other.key)
            self.touch([shard])

    def touch(self, shards: Iterable[OpenShard]) -> None:
        """Mark shards as recently used, the last one as most recent; add closed ones again."""
        with self._lock:
            for shard in shards:
                if shard.key in self._shards:
                    self._shards.move_to_end(shard.key)
                else:
                    self._shards[shard.key] = shard
                    self._num_samples += len(shard.tokens.counts)
            while len(self._shards) > 1 and (
                len(self._shards) > self._max_shards or self._num_samples > self._max_samples
            ):
                self._remove(next(iter(self._shards)))

    def _remove(self, key: Hashable) -> None:
        self._num_samples -= len(self._shards.pop(key).tokens.counts)


_pool = ShardPool(MAX_OPEN_SHARDS, MAX_OPEN_SAMPLES)
os.register_at_fork(after_in_child=_pool.clear)


def shard_pool() -> ShardPool:
    """Return this process's shard pool."""
    return _pool
