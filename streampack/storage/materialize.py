"""Make one shard available in a cache folder: fetch or find it, unpack, record, rename.

::

    lock --> still missing? --> room --> fetch --> size, hash --> unpack --> size, hash
                                           ^------ damaged: again ---'
         --> note: this size, time and hash --> rename --> unlock

Cost: one copy, one decompression, one hash of each file that has one; a few MiB of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.mds.codecs import HASHES
from streampack.mds.index import Shard, ShardFile
from streampack.storage.decompress import decompress_pieces
from streampack.storage.download import budget_s, fetch, fetch_if_there
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import CacheEntry, FileLocks
from streampack.storage.verify import FileVerifier, attach_uri
from streampack.stores.failures import DamagedError

LEAST_LOCK_S = 30.0  # allowance for unpacking and checks, on top of the download


def lock_s(location: StreamLocation, num_bytes: int | None = None) -> float:
    """Return how long a process may hold the lock of a file that it fetches."""
    return budget_s(location, num_bytes) + LEAST_LOCK_S


def lock_of_shard_s(location: StreamLocation, file: ShardFile) -> float:
    """Return how long a process may hold the lock of a shard: to make one takes any time."""
    return math.inf if file.make else lock_s(location, file.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloader:
    """The download functions; tests substitute their own."""

    fetch: Callable[..., Any] = fetch
    fetch_if_there: Callable[..., bool] = fetch_if_there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardMaterializer:
    """Makes the shards of one stream available; safe to pickle."""

    location: StreamLocation
    disk: LocalFilesystem
    store: Downloader
    verifier: FileVerifier
    limit: CacheLimit | None = None

    def materialize(self, shard: Shard, raw: Path, packed: Path) -> bool:
        """Make a shard's raw file available; return whether it was fetched or unpacked.

        `packed` is where its compressed form is kept, with `keep_zip` only.
        """
        locks = FileLocks(raw.parent, self.disk)
        with locks.hold(raw.name, lock_of_shard_s(self.location, shard.stored)):
            if self.verifier.verify(raw, shard.raw) is not None:
                return False
            locks.remove_leftovers(raw.name)
            if shard.raw.make is not None:
                locks.sweep()  # of a part of the folder, which no one checks as a whole
            return self._make(shard, raw, packed, locks)

    def _make(self, shard: Shard, raw: Path, packed: Path, locks: FileLocks) -> bool:
        incoming = {raw: shard.raw.num_bytes}
        if self.location.remote is not None and shard.packed is not None:
            incoming[packed] = shard.packed.num_bytes
        self.disk.remove(raw)  # damaged
        if self.limit is not None:
            state = self.disk.state
            sizes = {path.name: size for path, size in incoming.items() if state(path) is None}
            self.limit.reserve(raw.parent, sizes)
        self.verifier.raise_if_rewritten(shard)
        try:
            # Both temporary names use the raw file's name, because its lock guards them.
            with locks.temporary(raw.name) as new, locks.temporary(raw.name) as new_packed:
                is_new = self._bring(shard, packed, new, new_packed)
                self._reserve_more(shard, raw, new)
                self.verifier.raise_if_rewritten(shard)
                self.publish(new, raw, self.verifier.expected_at(new, shard.raw))
                if self.location.download.keep_zip and self.disk.state(new_packed) is not None:
                    self.publish(new_packed, packed, self.verifier.expected(shard.stored))
        finally:
            for path in incoming:
                with suppress(OSError):
                    if self.disk.state(path) is None:
                        FileLocks(path.parent, self.disk).remove_entry(path.name)
        return is_new

    def _reserve_more(self, shard: Shard, raw: Path, new: Path) -> None:
        """Make room for a file that is larger than was estimated before it was made."""
        state = self.disk.state(new) if self.limit is not None and shard.raw.make else None
        if self.limit is not None and state is not None and state.num_bytes > shard.raw.num_bytes:
            self.limit.reserve(raw.parent, {raw.name: state.num_bytes})

    def _bring(self, shard: Shard, packed: Path, new: Path, new_packed: Path) -> bool:
        if shard.raw.make is not None:
            shard.raw.make(new)
            return True
        if self.location.remote is None:
            source = self.location.folder / shard.stored.basename
            self.verifier.raise_if_damaged(source, shard.stored)
            with attach_uri(source, shard.stored.basename):
                self._unpack(source, str(source), shard, new)
            return True
        if shard.packed is None:
            self._fetch(shard, new, None)
            return True
        if self.verifier.verify(packed, shard.packed) is not None:
            try:
                self._unpack(packed, str(packed), shard, new)
            except DataError:  # refetched
                self.disk.remove(packed)
            else:
                return False
        name = shard.packed.basename
        self._fetch(shard, new_packed, lambda path: self._unpack(path, name, shard, new))
        return True

    def _unpack(self, source: Path, where: str, shard: Shard, raw: Path) -> None:
        # Hashed in the same pass: a second pass over the file would cost half as much as unpacking.
        algorithm = self.verifier.expected(shard.raw).partition(":")[0]
        digest = HASHES[algorithm]() if algorithm else None
        with self.disk.open(source) as file:
            pieces = decompress_pieces(file, where, shard)
            if digest is not None:
                pieces = (digest.update(piece) or piece for piece in pieces)
            self.disk.write(raw, pieces)
        text = f"{algorithm}:{digest.hexdigest()}" if digest is not None else ""
        problem = self.verifier.problem(raw, shard.raw, text)
        if problem is not None:
            raise DataError(f"{where}: unpacked, {problem}; rewrite the stream")

    def _fetch(self, shard: Shard, to: Path, unpack: Callable[[Path], None] | None) -> None:
        """Fetch a file until it is undamaged; a compressed one is verified by unpacking it."""
        file = shard.stored
        failures: list[OSError] = []

        def check(path: Path) -> None:
            """Refuse a damaged file, so that the download tries again."""
            failures.clear()
            try:
                if (problem := self.verifier.problem(path, file)) is not None:
                    raise DamagedError(problem)
                if unpack is not None:
                    unpack(path)
            except DataError as error:
                raise DamagedError(str(error).removeprefix(f"{file.basename}: ")) from error
            except OSError as error:
                # Not a network error: fetching the file again would not help.
                failures.append(error)

        self.store.fetch(
            self.location,
            file.basename,
            to,
            num_bytes=file.num_bytes,
            check=check,
            is_hashed=shard.is_hashed,
        )
        if failures:
            raise failures[0]

    def publish(self, temporary: Path, path: Path, hash_: str) -> None:
        state = self.disk.state(temporary)
        if state is None:
            raise FileNotFoundError(f"{temporary} was removed before it got its final name")
        entry = CacheEntry(num_bytes=state.num_bytes, mtime_ns=state.mtime_ns, hash=hash_)
        FileLocks(path.parent, self.disk).write_entry(path.name, entry)
        self.disk.rename(temporary, path)
