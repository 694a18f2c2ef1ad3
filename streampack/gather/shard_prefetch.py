"""Prefetch shards before they are read: threads that follow the plan.

::

    plan      needs  a c | c f | b e          finished  d
                     local  in flight, waiting
    threads   1 fetches f   2 fetches b       d may be evicted, if the cache has a limit
    reader    needs f now: waits for it, and f takes precedence over all others

A failure stops the prefetch and is raised by the next request for a batch. The threads start with
the first plan, never before a fork, and end with the iteration. Processes of one node that need the
same shards each start with a different part of the next ones.

Cost: nothing if all shards are local; else one `stat` per shard when it is due. Memory: integers;
fetched shards are on disk.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from streampack._threads import join_threads, ordered_thread_map, start_threads
from streampack.errors import WorkerError
from streampack.gather.lookup_kernels import find_shards
from streampack.plan.shard_tracker import ShardDelta
from streampack.streams import TokenStream
from streampack.types import Int64Array, Packs

FETCH_THREADS = 4
POLL_S = 1.0  # liveness poll interval while waiting
BUSY_S = 0.2  # poll interval for a shard that another process fetches
END_S = 1.0  # time limit for fetches in flight at the end of an iteration
TURN = 4  # consecutive shards left to each of the other processes

ShardKey = tuple[int, int]


def most_threads(streams: Sequence[TokenStream]) -> int:
    """Return the threads that a process fetches with: some, and one for each that tokenizes."""
    return FETCH_THREADS + max((stream.num_workers for stream in streams), default=0)


def cached_bytes(stream: TokenStream) -> Int64Array:
    """Return the peak bytes of each shard of a stream while it is fetched, shape (num_shards,)."""
    return stream.raw_bytes + stream.stored_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of one process's prefetch."""

    num_threads: int = FETCH_THREADS
    cache_bytes: int | None = None
    """Limit in bytes for the shards needed now or later, or None for no limit."""
    turn: int = 0
    num_turns: int = 1
    """Processes on the node; each starts with different shards."""


class _ShardTable:
    """The shards of all streams in one array, so that a batch needs a single lookup."""

    def __init__(self, streams: Sequence[TokenStream], fetches: Sequence[bool]) -> None:
        sizes = [len(stream.first_sample) for stream in streams]
        # Index of each stream's first shard, shape (num_streams + 1,).
        self._bases = np.cumsum([0, *sizes])
        self._first_samples = np.concatenate([stream.first_sample for stream in streams])
        self._is_here = ~np.repeat(np.array(fetches, np.bool_), sizes)

    def mark(self, key: ShardKey, *, is_here: bool) -> None:
        """Record whether a shard is local."""
        self._is_here[self._bases[key[0]] + key[1]] = is_here

    def missing(self, segments: Int64Array) -> list[ShardKey]:
        """Return the shards of some segments, shape (n, 6), that are not known to be local."""
        segments = np.ascontiguousarray(segments, np.int64)
        shards = np.empty(len(segments), np.int64)
        find_shards(segments, self._bases, self._first_samples, shards)
        absent = np.unique(shards[~self._is_here[shards]])
        if not len(absent):
            return []
        streams = np.searchsorted(self._bases, absent, side="right") - 1
        return list(zip(streams.tolist(), (absent - self._bases[streams]).tolist(), strict=True))


class ShardPrefetcher:
    """Threads that fetch shards in the order in which a plan needs them."""

    def __init__(self, streams: Sequence[TokenStream], limits: FetchLimits | None = None) -> None:
        self._streams = streams
        self._limits = limits or FetchLimits()
        self._bytes = [cached_bytes(stream) for stream in streams]
        self._fetches = [stream.cache.needs_fetch for stream in streams]
        self._all = _ShardTable(streams, self._fetches)
        # Acquired explicitly: `with condition` runs Python code, and an interrupt in it may leave
        # the lock held. Reentrant: garbage collection may call `close` at any point.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._urgent: deque[ShardKey] = deque()
        self._ahead: deque[ShardKey] = deque()
        self._needed: set[ShardKey] = set()
        self._awaited: Counter[ShardKey] = Counter()  # number of readers waiting for each
        self._here: set[ShardKey] = set()
        self._busy: set[ShardKey] = set()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._abandoned: deque[object] = deque()  # not empty: the holder is no longer referenced
        self._new: set[ShardKey] = set()  # local ones that were not when a thread got to them
        self._counts = {"fetched": 0, "fetched_bytes": 0, "waited_for": 0, "ahead_bytes": 0}
        self._waited_s = 0.0

    def end_with(self, holder: object) -> None:
        """End the threads when `holder` is freed, in case an interrupt skips `close`."""
        self._holder = weakref.ref(holder, self._abandoned.append)

    # Called by the process that plans and reads.

    def update_plan(self, needs: ShardDelta | None) -> None:
        """Follow the plan's new shards, if there are any. `finish` takes finished ones."""
        if needs is None:
            return
        ahead = [(s, shard) for s, shard in needs.ahead.tolist() if self._fetches[s]]
        for number, shards in _by_stream(ahead):
            self._streams[number].mark_planned(shards)
        with self._lock:
            self._needed = set(ahead)
            # A waiting reader has not yet seen its shard.
            kept = self._needed | self._awaited.keys()
            for key in self._here - kept:
                self._all.mark(key, is_here=False)
            self._here &= kept
            self._new &= kept
            self._ahead = deque(_own_first(self._within_limit(ahead), self._limits))
            self._start()
            self._changed.notify_all()

    def finish(self, finished: Int64Array) -> None:
        """Mark shards as read: rows (stream, shard), shape (n, 2)."""
        for number, shards in _by_stream(finished.tolist()):
            if self._fetches[number]:
                self._streams[number].mark_finished(shards)

    def wait_for(self, shards: Iterable[ShardKey]) -> None:
        """Wait until shards, given as (stream, shard), are local.

        Raises:
            DataError: If one cannot be fetched.
            WorkerError: If no thread is left to fetch it.
        """
        with self._lock:
            missing = [key for key in shards if self._fetches[key[0]] and key not in self._here]
            if not missing:
                return
            self._urgent.extend(missing)
            self._start()
            self._changed.notify_all()
            begin_s = time.monotonic()
            self._awaited.update(missing)
            try:
                self._wait_locked(missing)
            finally:
                self._awaited -= Counter(missing)
            num_late = len(self._new.intersection(missing))
            self._counts["waited_for"] += num_late
            self._waited_s += time.monotonic() - begin_s if num_late else 0.0

    def has(self, packs: Packs) -> bool:
        """Return whether all shards of some packs are local."""
        return not self._all.missing(packs.segments)

    def wait_for_packs(self, packs: Packs) -> None:
        """Wait until all shards of some packs are local; raises as `wait_for` does."""
        self.wait_for(self._all.missing(packs.segments))

    def check(self) -> None:
        """Raise the failure of a thread, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads; one waiting for a store ends at its time-out."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        join_threads(self._threads, END_S)

    def stats(self) -> dict[str, Any]:
        """Return the fetches and waits of this process, as plain numbers."""
        waiting = 0 if self._is_closed else len(self._needed - self._here)
        return {**self._counts, "waited_s": self._waited_s, "waiting": waiting}

    # Run in the threads.

    def _start(self) -> None:
        if self._threads or self._is_closed:
            return
        self._threads = [
            threading.Thread(target=self._work_on, name=f"streampack-fetch-{i}", daemon=True)
            for i in range(self._limits.num_threads)
        ]
        start_threads(self._threads)

    def _work_on(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._fetch(*work)
        except BaseException as failure:  # raised by the next request for a batch
            with self._lock:
                self._failure = self._failure or failure
                self._is_closed = True
                self._changed.notify_all()

    def _next(self) -> tuple[ShardKey, bool] | None:
        """Return a shard to fetch, and whether a reader waits for it; None at the end."""
        with self._lock:
            while not self._is_closed and not self._abandoned:
                for keys in (self._urgent, self._ahead):
                    while keys:
                        key = keys.popleft()
                        if key not in self._here and key not in self._busy:
                            self._busy.add(key)
                            return key, keys is self._urgent
                self._changed.wait(POLL_S)
            return None

    def _fetch(self, key: ShardKey, is_waiting: bool) -> None:
        number, shard = key
        stream = self._streams[number]
        is_new = not stream.is_here(shard)
        num_bytes = stream.fetch(shard, is_waiting=is_waiting) if is_new else 0
        if num_bytes is None:
            # Another process fetches it: fetch others meanwhile, unless a reader waits for it.
            with self._lock:
                self._busy.discard(key)
                if key in self._awaited:
                    self._urgent.append(key)
                elif key in self._needed:  # the plan may have advanced since
                    self._ahead.append(key)
                    self._changed.wait(BUSY_S)
            return
        with self._lock:
            self._busy.discard(key)
            self._here.add(key)
            self._all.mark(key, is_here=True)
            if is_new:
                self._new.add(key)
                ahead_bytes = sum(int(self._bytes[s][i]) for s, i in self._here & self._needed)
                self._counts["ahead_bytes"] = max(self._counts["ahead_bytes"], ahead_bytes)
            if num_bytes:  # else another thread or process fetched it and counts it
                self._counts["fetched"] += 1
                self._counts["fetched_bytes"] += num_bytes
            self._changed.notify_all()

    def _within_limit(self, shards: list[ShardKey]) -> list[ShardKey]:
        limit = self._limits.cache_bytes
        if limit is None:
            return shards
        totals = accumulate(int(self._bytes[s][shard]) for s, shard in shards)
        return [key for key, total in zip(shards, totals, strict=True) if total <= limit]

    def _wait_locked(self, missing: list[ShardKey]) -> None:
        while not self._here.issuperset(missing):
            self.check()
            if self._is_closed or not any(thread.is_alive() for thread in self._threads):
                raise WorkerError(
                    f"no thread of process {os.getpid()} is left to fetch shards; start the "
                    "iteration again, in the process that consumes it"
                )
            self._changed.wait(POLL_S)


def _by_stream(shards: list[Any]) -> Iterator[tuple[int, Int64Array]]:
    by_stream: dict[int, list[int]] = {}
    for number, shard in shards:
        by_stream.setdefault(number, []).append(shard)
    for number, own in by_stream.items():
        yield number, np.array(own, np.int64)


def _own_first(shards: list[ShardKey], limits: FetchLimits) -> list[ShardKey]:
    """Return shards in order of need, but in each small group this process's part first."""
    if limits.num_turns == 1:
        return shards
    size = TURN * limits.num_turns
    order = []
    for begin in range(0, len(shards), size):
        part = shards[begin : begin + size]
        first = limits.turn * TURN
        order += part[first:] + part[:first]
    return order


def fetch_all(stream: TokenStream, shards: Int64Array) -> list[int]:
    """Fetch shards of one stream concurrently; raise a DataError if one cannot be fetched.

    Returns the bytes of each fetched shard, without those that another thread or process, such as
    the prefetch, fetched meanwhile.
    """
    missing = [shard for shard in shards.tolist() if not stream.is_here(shard)]
    if not missing:
        return []
    num_threads = min(most_threads([stream]), len(missing))
    fetched = ordered_thread_map(missing, stream.fetch, num_threads, num_threads)
    return [num_bytes for num_bytes in fetched if num_bytes]
