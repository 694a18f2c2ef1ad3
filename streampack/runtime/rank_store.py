"""Values that ranks leave for each other in the store of torch's process group, without waiting.

::

    rank 1   put({"lane 3": ...}) --thread--> torch's store <-- get(["lane 1", "lane 3"])   rank 0

A value replaces the one before it. Without a process group, or with a store that fails, nothing is
found. A worker of torch's DataLoader opens a connection of its own, where the store is a TCPStore.

Cost: `put` takes about 0.1 ms, if it starts the thread; `get` a round trip, and two more and the
values where any rank put one since.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import distributed

from streampack._threads import start_threads
from streampack.errors import ConfigError
from streampack.runtime.rank_digest import other_ranks
from streampack.runtime.torch_worker import worker_here
from streampack.world import World

COUNT = "streampack/puts"  # key of the number of times that ranks put values

logger = logging.getLogger(__name__)


class RankStore:
    """Values as JSON, by key, of the ranks of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._waiting: dict[str, Any] = {}
        self._is_sending = False
        self._own_client: Any = None
        # Number of puts, keys asked for, and the values that were found then.
        self._found: tuple[int, Sequence[str], dict[str, Any]] = (-1, (), {})

    def __reduce__(self) -> tuple[type[RankStore], tuple[World]]:
        return RankStore, (self._world,)

    @property
    def is_alone(self) -> bool:
        """Whether this rank has no other to leave values to."""
        return other_ranks(self._world) < 1

    def put(self, values: Mapping[str, Any]) -> None:
        """Leave values, in a thread; they must not be changed afterwards."""
        if not values or self.is_alone:
            return
        with self._lock:
            self._waiting |= values
            starts, self._is_sending = not self._is_sending, True
        if starts:
            # A daemon thread does not delay the interpreter's exit.
            thread = threading.Thread(target=self._send, name="streampack-rank-store", daemon=True)
            try:
                start_threads([thread])
            except ConfigError:  # the system allows no more threads
                self._send()

    def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the values that are there, by key."""
        if not keys or self.is_alone:
            return {}
        return self._with_store(partial(self._read, keys=keys)) or {}

    def _read(self, store: Any, keys: Sequence[str]) -> dict[str, Any]:
        # Read before the values: if one arrives meanwhile, the next call reads again.
        count = store.add(COUNT, 0)
        if (count, keys) != self._found[:2]:
            there = _present(store, keys)
            texts = store.multi_get(there) if there else []
            values = {key: json.loads(text) for key, text in zip(there, texts, strict=True)}
            self._found = count, keys, values
        return self._found[2]

    def _send(self) -> None:
        while values := self._next():
            self._with_store(partial(_write, values=values))

    def _next(self) -> dict[str, Any]:
        with self._lock:
            values, self._waiting = self._waiting, {}
            self._is_sending = bool(values)
            return values

    def _with_store(self, use: Callable[[Any], Any]) -> Any:
        try:
            torchs: Any = distributed.distributed_c10d
            store = self._own_client or torchs._get_default_store()
            while isinstance(store, torchs.PrefixStore):
                store = store.underlying_store
            if worker_here() and self._own_client is None:
                # A fork must not use the connection of its parent.
                self._own_client = store = type(store)(
                    store.host, store.port, is_master=False, wait_for_workers=False
                )
            return use(store)
        except (AttributeError, RuntimeError, ValueError) as error:
            logger.info("torch's store failed (%s); states have fewer snapshots", error)
            return None


def _write(store: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        store.set(key, json.dumps(value, separators=(",", ":")))
    store.add(COUNT, 1)


def _present(store: Any, keys: Sequence[str]) -> list[str]:
    """Return those of the keys that the store has; it answers only for all keys of a question."""
    if store.check(list(keys)):
        return list(keys)
    half = len(keys) // 2
    return _present(store, keys[:half]) + _present(store, keys[half:]) if half else []
