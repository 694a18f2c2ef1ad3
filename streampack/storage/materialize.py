"""Make one shard available in a folder of this node: fetch or find it, unpack, record, rename.

::

    lock --> still missing? --> room --> fetch --> size, hash --> unpack --> size, hash
                                           ^------ damaged: again ---'
         --> manifest entry: ours, this size, time and hash --> rename --> unlock

A process killed at any point leaves complete files, or temporary names that a later start removes.
A failure leaves only its note.

Cost: one copy, one decompression, one hash of each file that has one; a few MiB of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.mds.index import Part, Shard
from streampack.storage.decompress import decompress_pieces
from streampack.storage.download import budget_s, fetch, fetch_if_there
from streampack.storage.download_errors import DamagedError
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import FileLocks
from streampack.storage.manifest import Digest, Manifest
from streampack.storage.owner import CacheOwner
from streampack.storage.verify import FileVerifier, as_data_error, attach_uri

LEAST_LOCK_S = 30.0  # allowance for unpacking and checks, on top of the download


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloader:
    """The download functions; tests substitute their own."""

    fetch: Callable[..., Any] = fetch
    """As `storage.download.fetch`."""
    fetch_if_there: Callable[..., bool] = fetch_if_there
    """As `storage.download.fetch_if_there`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardMaterializer:
    """Makes the shards of one stream available; safe to pickle."""

    files: StreamLocation
    """Location of the stream's files."""
    disk: LocalFilesystem
    """Filesystem of its local folder."""
    store: Downloader
    """Downloads its files."""
    checked: FileVerifier
    """Verifies its files."""
    owner: CacheOwner
    """The remote that the local folder belongs to."""
    limit: CacheLimit | None = None
    """Limit on the bytes of its files."""

    @property
    def is_remote(self) -> bool:
        """Whether the stream has a remote."""
        return self.files.remote is not None

    def lock_s(self, num_bytes: int | None) -> float:
        """Return how long a process may hold a file's lock."""
        return budget_s(self.files, num_bytes) + LEAST_LOCK_S

    def discard(self, temporary: Path) -> None:
        """Remove a temporary file; on failure, leave it to a later start."""
        with suppress(OSError):
            self.disk.remove(temporary)

    def bring(self, shard: Shard, home: Path) -> bool:
        """Make a shard's raw file available in a folder; return False if it was there already.

        Raises:
            DataError: If it cannot be fetched, or does not match index.json.
            OSError: If a local stream's shard cannot be unpacked in this folder.
        """
        path = home / shard.raw.basename
        part = shard.packed or shard.raw
        locks = FileLocks(home, self.disk)
        with locks.hold(shard.raw.basename, self.lock_s(part.num_bytes)):
            is_missing = not self.checked.is_whole(home, shard.raw)
            if is_missing:
                locks.remove_remains(shard.raw.basename)
                if self.is_remote:
                    # Inside the lock, so that waiting processes also get the error for a full disk.
                    with as_data_error(path, part.num_bytes + shard.raw.num_bytes):
                        self._make(shard, home, locks)
                else:
                    self._make(shard, home, locks)
        return is_missing

    def throw_away(self, home: Path, damaged: FileState, basename: str, packed: str = "") -> bool:
        """Remove a damaged file of ours, and the compressed file that it was made from.

        Args:
            home: The file's folder.
            damaged: The damaged version.
            basename: The file's path in that folder.
            packed: Path of the compressed file; empty: there is none.

        Returns:
            Whether a new copy may be available; False if the file is not ours to remove.

        Raises:
            DataError: If another process does not release the file's lock.
            OSError: If it cannot be removed.
        """
        with FileLocks(home, self.disk).hold(basename, self.lock_s(None)):
            if self.checked.seen(home / basename) != damaged:
                return True  # another process has replaced it
            records = Manifest(home, self.disk)
            if not records.has(basename):
                return False
            for name in filter(None, (packed, basename)):
                if records.has(name):
                    self.disk.remove(home / name)
        return True

    def _make(self, shard: Shard, home: Path, locks: FileLocks) -> None:
        if self._stays(home, shard.raw):
            return
        parts = [shard.raw]
        if shard.packed is not None and self.is_remote:
            parts.append(shard.packed)
        if self.limit is not None:
            self.limit.reserve(home, [part for part in parts if self._is_missing(home, part)])
        if self.is_remote and not self.owner.claim():  # the folder may have been deleted
            self.owner.refuse_others()
        # Read before the fetch, so that a replacement during it is noticed later.
        origin = self.checked.origin(shard)
        if origin:
            self.checked.refuse_rewritten()
        # Both temporary names use the raw file's name, because its lock guards them.
        raw, packed = (locks.temporary(shard.raw.basename) for _ in range(2))
        try:
            if shard.packed is None:
                self._fetch(shard, raw, None)
            else:
                self._unpack_some(shard, shard.packed, packed, raw)
            self.name(raw, home, shard.raw.basename, self.checked.wanted(shard.raw), origin)
            if shard.packed is not None and self._keeps(packed):
                wanted = self.checked.wanted(shard.packed)
                self.name(packed, self.files.folder, shard.packed.basename, wanted, origin)
        finally:
            self.discard(raw)
            self.discard(packed)
            for part in parts:
                with suppress(OSError):
                    if self._is_missing(home, part):
                        Manifest(home, self.disk).remove(part.basename)

    def _is_missing(self, home: Path, part: Part) -> bool:
        return self.disk.state(home / part.basename) is None

    def _keeps(self, packed: Path) -> bool:
        return bool(self.files.stream.safe_keep_zip) and self.disk.state(packed) is not None

    def _stays(self, home: Path, part: Part) -> bool:
        """Remove a damaged file of ours; return whether a file of another program is complete.

        Raises:
            DataError: If another program's file is damaged: it is not ours to remove.
        """
        path = home / part.basename
        if self.disk.state(path) is None:
            return False
        if not Manifest(home, self.disk).has(part.basename):
            self.checked.refuse(path, part)
            return True
        self.disk.remove(path)
        return False

    def _unpack_some(self, shard: Shard, part: Part, packed: Path, raw: Path) -> None:
        """Unpack the local compressed file, fetching it first if it is missing or damaged."""
        source = self.files.folder / part.basename
        if not self.is_remote or self.checked.is_whole(self.files.folder, part):
            self.checked.refuse(source, part)
            try:
                with attach_uri(source, part.basename):
                    self._unpack(source, str(source), shard, raw)
                return
            except DataError:
                if not self.is_remote:
                    raise
        # Its size and hash (if any) match, but it does not unpack: refused if not ours.
        if self._stays(self.files.folder, part):
            raise DataError(
                f"{source}: does not unpack to what index.json says, and streampack did not put it "
                "there; delete it, so that it can be fetched",
                uri=str(source),
                shard=part.basename,
            )
        self._fetch(shard, packed, lambda path: self._unpack(path, part.basename, shard, raw))

    def _unpack(self, source: Path, where: str, shard: Shard, raw: Path) -> None:
        """Unpack a compressed file into a temporary one.

        Raises:
            DataError: If the result does not match index.json.
            OSError: If the source cannot be read, or the target cannot be written.
        """
        # Hashed in the same pass: a second pass over the file would cost half as much as unpacking.
        digest = Digest(self.checked.wanted(shard.raw))
        with self.disk.open(source) as file:
            self.disk.write(raw, digest.of(decompress_pieces(file, where, shard)))
        problem = self.checked.problem(raw, shard.raw, digest.text)
        if problem is not None:
            raise DataError(f"{where}: unpacked, {problem}; write the stream anew")

    def _fetch(self, shard: Shard, to: Path, unpack: Callable[[Path], None] | None) -> None:
        """Fetch a file until it is undamaged; a compressed one is verified by unpacking it."""
        part = shard.packed or shard.raw
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
                # Not a network error: fetching the file again would not help.
                failures.append(error)

        self.store.fetch(
            self.files,
            part.basename,
            to,
            num_bytes=part.num_bytes,
            check=check,
            is_hashed=self.checked.is_hashed(shard),
        )
        if failures:
            raise failures[0]

    def name(self, temporary: Path, home: Path, basename: str, hash_: str, origin: str) -> None:
        """Record a file as ours and verified, and rename it to its final name.

        Args:
            temporary: The file.
            home: Its destination folder.
            basename: Its path in that folder.
            hash_: Its verified hash, as "algorithm:digest"; empty if none is known.
            origin: Version of its source, in the manifest's form.

        Raises:
            OSError: If the entry or the file cannot be written.
        """
        state = self.disk.state(temporary)
        if state is None:
            raise FileNotFoundError(f"{temporary} was removed before it got its name")
        known, boot_id = self.checked.lasting(home, state), self.checked.boot_id(home)
        # In this order: a file of ours without an entry would be taken for another program's.
        Manifest(home, self.disk).remember(basename, known, hash_, boot_id, origin)
        self.disk.rename(temporary, home / basename)
