"""Bring shards here before they are read: threads that follow the plan.

::

    plan      needs  a c | c f | b e          finished  d
                     here  under way, waiting
    threads   1 brings f   2 brings b         d may go first, where the cache has a limit
    reader    needs f now: waits for it, and it goes before all others

A failure stops the read-ahead and is raised by whoever asks for a batch next. The threads start
with the first plan, never before a fork, and end with the iteration. Processes of one node that
need the same shards each begin with their own part of the next ones.

Cost: nothing where all is here; else one `stat` a shard when it comes near. Memory: integers; what
is brought lies on disk.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from streampack.errors import WorkerError
from streampack.plan import ShardNeeds
from streampack.read import find_kernels
from streampack.streams import OpenStream
from streampack.types import Int64Array, Packs

__all__ = ["FETCH_THREADS", "FetchLimits", "ShardFetcher", "bring_all", "cached_bytes"]

FETCH_THREADS = 4
ALIVE_S = 1.0  # how often whoever waits looks whether somebody works
BUSY_S = 0.2  # until a shard that another process brings is looked at again
LEAVE_S = 1.0  # how long the end of an iteration waits for fetches that are under way
TURN = 4  # shards in a row that a process leaves to each of those beside it

Key = tuple[int, int]


def cached_bytes(stream: OpenStream) -> Int64Array:
    """Return what each shard of a stream takes at most while it is brought, shape (num_shards,)."""
    packed = [shard.packed.num_bytes if shard.packed else 0 for shard in stream.index.shards]
    return stream.raw_bytes + np.array(packed, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """How much one process fetches ahead."""

    num_threads: int = FETCH_THREADS
    """Shards that are brought at once."""
    cache_bytes: int | None = None
    """What the shards that are needed, or will be, may take; None: all of them."""
    turn: int = 0
    """Which of the processes on this node this is, and ..."""
    num_turns: int = 1
    """... how many they are: each begins with other shards."""


class _ShardTable:
    """The shards of all streams in one row, so that a batch is looked up at once."""

    def __init__(self, streams: Sequence[OpenStream], fetches: Sequence[bool]) -> None:
        sizes = [len(stream.first_sample) for stream in streams]
        # Where each stream begins in what follows, shape (num_streams + 1,).
        self._bases = np.cumsum([0, *sizes])
        self._first_samples = np.concatenate([stream.first_sample for stream in streams])
        self._is_here = ~np.repeat(np.array(fetches, np.bool_), sizes)

    def mark(self, key: Key, *, is_here: bool) -> None:
        """Say whether a shard is here."""
        self._is_here[self._bases[key[0]] + key[1]] = is_here

    def missing(self, segments: Int64Array) -> list[Key]:
        """Return which shards of some segments, shape (n, 6), are not known to be here."""
        segments = np.ascontiguousarray(segments, np.int64)
        if find_kernels.are_here(segments, self._bases, self._first_samples, self._is_here):
            return []
        shards = np.empty(len(segments), np.int64)
        find_kernels.find_shards(segments, self._bases, self._first_samples, shards)
        absent = np.unique(shards[~self._is_here[shards]])
        streams = np.searchsorted(self._bases, absent, side="right") - 1
        return list(zip(streams.tolist(), (absent - self._bases[streams]).tolist(), strict=True))


class ShardFetcher:
    """Threads that bring shards in the order in which a plan will need them.

    Args:
        streams: The streams, by number.
        limits: How much it may do.
    """

    def __init__(self, streams: Sequence[OpenStream], limits: FetchLimits | None = None) -> None:
        self._streams = streams
        self._limits = limits or FetchLimits()
        self._bytes = [cached_bytes(stream) for stream in streams]
        self._fetches = [stream.needs_fetch for stream in streams]
        self._all = _ShardTable(streams, self._fetches)
        # Taken by itself: Condition's own `with` is Python code, which an interrupt may leave with
        # the lock taken. Reentrant: a garbage collection may call `close` wherever it comes.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._notes: deque[Callable[[], None]] = deque()
        self._is_noting = False
        self._urgent: deque[Key] = deque()
        self._ahead: deque[Key] = deque()
        self._needed: set[Key] = set()
        self._awaited: Counter[Key] = Counter()  # by how many readers just now
        self._here: set[Key] = set()
        self._busy: set[Key] = set()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._new: set[Key] = set()  # of those here: not here when a thread came to them
        self._counts = {"fetched": 0, "fetched_bytes": 0, "waited_for": 0, "ahead_bytes": 0}
        self._waited_s = 0.0

    # What the one who plans and reads calls.

    def follow(self, needs: ShardNeeds | None) -> None:
        """Look ahead as a plan says; None: as before.

        Args:
            needs: What is needed from now on; what it says of finished shards is for `finish`.
        """
        if needs is None:
            return
        ahead = [(s, shard) for s, shard in needs.ahead.tolist() if self._fetches[s]]
        with self._lock:
            self._needed = set(ahead)
            # A reader that waits has yet to see what came for it.
            kept = self._needed | self._awaited.keys()
            for key in self._here - kept:
                self._all.mark(key, is_here=False)
            self._here &= kept
            self._new &= kept
            self._ahead = deque(_own_first(self._within_limit(ahead), self._limits))
            self._notes.append(lambda: self._note(ahead, is_finished=False))
            self._start()
            self._changed.notify_all()

    def finish(self, finished: Int64Array) -> None:
        """Say that shards were read, rows (stream, shard), shape (n, 2)."""
        shards = [(s, shard) for s, shard in finished.tolist() if self._fetches[s]]
        if shards:
            with self._lock:
                self._notes.append(lambda: self._note(shards, is_finished=True))
                self._changed.notify_all()

    def need(self, shards: Iterable[Key]) -> None:
        """Wait until (stream, shard) are here.

        Raises:
            DataError: If one cannot be had.
            WorkerError: If no thread is left to bring it.
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
                self._wait_for(missing)
            finally:
                self._awaited -= Counter(missing)
            num_late = len(self._new.intersection(missing))
            self._counts["waited_for"] += num_late
            self._waited_s += time.monotonic() - begin_s if num_late else 0.0

    def has(self, packs: Packs) -> bool:
        """Whether all shards of some packs are here."""
        return not self._all.missing(packs.segments)

    def need_for(self, packs: Packs) -> None:
        """Wait until all shards of some packs are here; as `need`."""
        missing = self._all.missing(packs.segments)
        if missing:
            self.need(missing)

    def check(self) -> None:
        """Raise what went wrong in a thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads; one that waits for a store ends by itself, at the latest in time."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + LEAVE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline_s - time.monotonic(), 0))

    def stats(self) -> dict[str, Any]:
        """Return what was brought and waited for in this process, as plain numbers."""
        return {**self._counts, "waited_s": self._waited_s}

    # What the threads do.

    def _start(self) -> None:
        if self._threads or self._is_closed:
            return
        self._threads = [
            threading.Thread(target=self._run, name=f"streampack-fetch-{i}", daemon=True)
            for i in range(self._limits.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except BaseException as failure:  # to be raised where the next batch is asked for
            with self._lock:
                self._failure = self._failure or failure
                self._is_closed = True
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Return what to do now; None at the end."""
        with self._lock:
            while not self._is_closed:
                if self._notes and not self._is_noting:
                    self._is_noting = True
                    return self._write_notes
                for keys in (self._urgent, self._ahead):
                    while keys:
                        key = keys.popleft()
                        if key not in self._here and key not in self._busy:
                            self._busy.add(key)
                            return partial(self._bring, key, is_waiting=keys is self._urgent)
                self._changed.wait(ALIVE_S)
            return None

    def _bring(self, key: Key, *, is_waiting: bool) -> None:
        number, shard = key
        stream = self._streams[number]
        is_new = not stream.is_here(shard)
        if is_new and not stream.bring(shard, is_waiting=is_waiting):
            # Another process brings it: there are others to do meanwhile, unless a reader waits.
            with self._lock:
                self._busy.discard(key)
                if key in self._awaited:
                    self._urgent.append(key)
                elif key in self._needed:  # the plan may have gone on since
                    self._ahead.append(key)
                    self._changed.wait(BUSY_S)
            return
        with self._lock:
            self._busy.discard(key)
            self._here.add(key)
            self._all.mark(key, is_here=True)
            if is_new:
                self._new.add(key)
                self._counts["fetched"] += 1
                self._counts["fetched_bytes"] += _fetched_bytes(stream, shard)
                ahead_bytes = sum(int(self._bytes[s][i]) for s, i in self._here & self._needed)
                self._counts["ahead_bytes"] = max(self._counts["ahead_bytes"], ahead_bytes)
            self._changed.notify_all()

    def _write_notes(self) -> None:
        try:
            while self._notes:
                self._notes.popleft()()
        finally:
            with self._lock:
                self._is_noting = False
                self._changed.notify_all()

    def _note(self, shards: list[Key], *, is_finished: bool) -> None:
        for number, stream in enumerate(self._streams):
            own = np.array([shard for s, shard in shards if s == number], np.int64)
            if len(own):
                (stream.finished if is_finished else stream.planned)(own)

    def _within_limit(self, shards: list[Key]) -> list[Key]:
        limit = self._limits.cache_bytes
        if limit is None:
            return shards
        totals = accumulate(int(self._bytes[s][shard]) for s, shard in shards)
        return [key for key, total in zip(shards, totals, strict=True) if total <= limit]

    def _wait_for(self, missing: list[Key]) -> None:
        """Wait for shards, with the lock held."""
        while not self._here.issuperset(missing):
            self.check()
            if self._is_closed or not any(thread.is_alive() for thread in self._threads):
                raise WorkerError(
                    f"no thread of process {os.getpid()} is left to bring shards; begin the "
                    "iteration anew, in the process that goes through it"
                )
            self._changed.wait(ALIVE_S)


def _own_first(shards: list[Key], limits: FetchLimits) -> list[Key]:
    """Return shards in order of need, but of each few first those that are this process's turn."""
    if limits.num_turns == 1:
        return shards
    size = TURN * limits.num_turns
    order = []
    for begin in range(0, len(shards), size):
        part = shards[begin : begin + size]
        first = limits.turn * TURN
        order += part[first:] + part[:first]
    return order


def bring_all(stream: OpenStream, shards: Int64Array) -> list[int]:
    """Bring shards of one stream here, several at once, and wait for them.

    Returns:
        The bytes that were fetched, of each shard that was not here.

    Raises:
        DataError: If one cannot be had.
    """
    missing = [shard for shard in shards.tolist() if not stream.is_here(shard)]
    if len(missing) == 1:
        [shard] = missing
        if not stream.bring(shard, is_waiting=False):
            stream.bring(shard)
            return []  # a thread that reads ahead, or another process, fetched it
    elif missing:
        fetcher = ShardFetcher([stream], FetchLimits(num_threads=min(FETCH_THREADS, len(missing))))
        try:
            fetcher.need([(0, shard) for shard in missing])
        finally:
            fetcher.close()
    return [_fetched_bytes(stream, shard) for shard in missing]


def _fetched_bytes(stream: OpenStream, shard: int) -> int:
    info = stream.index.shards[shard]
    return (info.packed or info.raw).num_bytes
