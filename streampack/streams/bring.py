"""One shard brought to a folder of this node: fetched or found, unpacked, recorded, named.

::

    lock --> still missing? --> room --> fetch --> size, hash --> unpack --> size, hash
                                           ^------ damaged: again ---'
         --> record: ours, this size, time and hash --> rename --> unlock

Killed at any point it leaves whole files, or names that a later start removes. A failure leaves
nothing but its note.

Cost: one copy, one decompression, a hash of each file that has one; memory of a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.streams.checked import CheckedFiles, naming, typed_errors
from streampack.streams.compression import decompress_pieces
from streampack.streams.disk import Disk
from streampack.streams.eviction import CacheLimit
from streampack.streams.fetch import DamagedError, budget_s, fetch, fetch_if_there
from streampack.streams.files import StreamFiles
from streampack.streams.index import Part, Shard
from streampack.streams.locks import FileLocks
from streampack.streams.records import Digest, Records

__all__ = ["ShardBringer", "Store"]

LEAST_LOCK_S = 30.0  # what unpacking and checks may take beside the download


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """How one object is brought here; a test may put something else in its place."""

    fetch: Callable[..., Any] = fetch
    """As `streams.fetch.fetch`."""
    fetch_if_there: Callable[..., bool] = fetch_if_there
    """As `streams.fetch.fetch_if_there`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardBringer:
    """Brings the shards of one stream; safe to pickle."""

    files: StreamFiles
    """Where the stream's files are."""
    disk: Disk
    """What its local folder lies on."""
    store: Store
    """How its files are fetched."""
    checked: CheckedFiles
    """Which files are whole."""
    limit: CacheLimit | None = None
    """How much room its files may take."""

    @property
    def is_remote(self) -> bool:
        """Whether there is somewhere else to fetch from."""
        return self.files.remote is not None

    def lock_s(self, num_bytes: int | None) -> float:
        """Return how long a process may hold a file's lock."""
        return budget_s(self.files, num_bytes) + LEAST_LOCK_S

    def discard(self, temporary: Path) -> None:
        """Remove a temporary file if it can be removed; what cannot is left to a later start."""
        with suppress(OSError):
            self.disk.remove(temporary)

    def bring(self, shard: Shard, home: Path) -> Path:
        """Bring a shard's raw file to a folder, unless it is there by then; return its path.

        Raises:
            DataError: If it cannot be had, or is not what index.json says.
            OSError: If a local stream's shard cannot be unpacked in this folder.
        """
        path = home / shard.raw.basename
        part = shard.packed or shard.raw
        locks = FileLocks(home, self.disk)
        with locks.hold(shard.raw.basename, self.lock_s(part.num_bytes)):
            if not self.checked.is_whole(home, shard.raw):
                locks.remove_remains(shard.raw.basename)
                if self.is_remote:
                    # Here, so that who waits for the lock hears of a full disk too.
                    with typed_errors(path, part.num_bytes + shard.raw.num_bytes):
                        self._make(shard, home, locks)
                else:
                    self._make(shard, home, locks)
        return path

    def _make(self, shard: Shard, home: Path, locks: FileLocks) -> None:
        if self._stays(home, shard.raw):
            return
        parts = [shard.raw]
        if shard.packed is not None and self.is_remote:
            parts.append(shard.packed)
        if self.limit is not None:
            self.limit.reserve(home, [part for part in parts if self._is_missing(home, part)])
        # Asked for before it is fetched: what is replaced meanwhile is seen as another one later.
        origin = self.checked.origin(shard)
        # Both named after the raw file, whose lock guards them.
        raw, packed = (locks.temporary(shard.raw.basename) for _ in range(2))
        try:
            if shard.packed is None:
                self._fetch(shard.raw, raw, None)
            else:
                self._unpack_some(shard, shard.packed, packed, raw)
            self._name(raw, home, shard.raw, origin)
            if shard.packed is not None and self._keeps(packed):
                self._name(packed, self.files.folder, shard.packed, origin)
        finally:
            self.discard(raw)
            self.discard(packed)
            for part in parts:
                with suppress(OSError):
                    if self._is_missing(home, part):
                        Records(home, self.disk).remove(part.basename)

    def _is_missing(self, home: Path, part: Part) -> bool:
        return self.disk.state(home / part.basename) is None

    def _keeps(self, packed: Path) -> bool:
        return bool(self.files.stream.safe_keep_zip) and self.disk.state(packed) is not None

    def _stays(self, home: Path, part: Part) -> bool:
        """Remove a damaged file of ours; of somebody else's, return whether it is whole after all.

        Raises:
            DataError: If somebody else's is damaged: it is not ours to remove.
        """
        path = home / part.basename
        if self.disk.state(path) is None:
            return False
        if not Records(home, self.disk).has(part.basename):
            self.checked.refuse(path, part)
            return True
        self.disk.remove(path)
        return False

    def _unpack_some(self, shard: Shard, part: Part, packed: Path, raw: Path) -> None:
        """Unpack the compressed file that lies here; without a whole one, fetch it first."""
        source = self.files.folder / part.basename
        if not self.is_remote or self.checked.is_whole(self.files.folder, part):
            self.checked.refuse(source, part)
            try:
                with naming(source, part.basename):
                    self._unpack(source, str(source), shard, raw)
                return
            except DataError:
                if not self.is_remote:
                    raise
        # Whole by its size and hash, if it has one, and yet of no use: refused if not ours.
        if self._stays(self.files.folder, part):
            raise DataError(
                f"{source}: does not unpack to what index.json says, and streampack did not put it "
                "there; delete it, so that it can be fetched",
                uri=str(source),
                shard=part.basename,
            )
        self._fetch(part, packed, lambda path: self._unpack(path, part.basename, shard, raw))

    def _unpack(self, source: Path, where: str, shard: Shard, raw: Path) -> None:
        """Unpack a compressed file into a temporary one.

        Raises:
            DataError: If that does not give what index.json says.
            OSError: If it cannot be read, or the other one not be written.
        """
        # Hashed under way: a second pass over the file would cost half as much as unpacking it.
        digest = Digest(self.checked.wanted(shard.raw))
        with self.disk.open(source) as file:
            self.disk.write(raw, digest.of(decompress_pieces(file, where, shard)))
        problem = self.checked.problem(raw, shard.raw, digest.text)
        if problem is not None:
            raise DataError(f"{where}: unpacked, {problem}; write the stream anew")

    def _fetch(self, part: Part, to: Path, unpack: Callable[[Path], None] | None) -> None:
        """Fetch a file until it is undamaged, which for a compressed one unpacking tells."""
        failures: list[OSError] = []

        def check(path: Path) -> None:
            failures.clear()
            try:
                problem = self.checked.problem(path, part)
                if problem is not None:
                    raise DamagedError(problem)
                if unpack is not None:
                    unpack(path)
            except DataError as error:
                raise DamagedError(str(error).removeprefix(f"{part.basename}: ")) from error
            except OSError as error:
                # The network is not to blame: fetching it again would not help.
                failures.append(error)

        self.store.fetch(self.files, part.basename, to, num_bytes=part.num_bytes, check=check)
        if failures:
            raise failures[0]

    def _name(self, temporary: Path, home: Path, part: Part, origin: str) -> None:
        """Record that a file is ours and whole, and give it its name."""
        state = self.disk.state(temporary)
        if state is None:
            raise FileNotFoundError(f"{temporary} was removed before it got its name")
        records, boot_id = Records(home, self.disk), self.checked.boot_id(home)
        # In this order: a file of ours without a record would be taken for somebody else's.
        records.remember(part.basename, state, self.checked.wanted(part), boot_id, origin)
        self.disk.rename(temporary, home / part.basename)
