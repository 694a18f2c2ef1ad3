"""Make one shard available in a folder of this node: fetch or find it, unpack, record, rename.

::

    lock --> still missing? --> room --> fetch --> size, hash --> unpack --> size, hash
                                           ^------ damaged: again ---'
         --> manifest entry: ours, this size, time and hash --> rename --> unlock

Cost: one copy, one decompression, one hash of each file that has one; a few MiB of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.mds.index import Shard, ShardFile
from streampack.storage.checksum import Digest
from streampack.storage.decompress import decompress_pieces
from streampack.storage.download import budget_s, fetch, fetch_if_there
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import FileLocks
from streampack.storage.manifest import CacheEntry, Manifest
from streampack.storage.owner import CacheOwner
from streampack.storage.verify import FileVerifier, as_data_error, attach_uri
from streampack.stores.failures import DamagedError

LEAST_LOCK_S = 30.0  # allowance for unpacking and checks, on top of the download


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
    owner: CacheOwner
    limit: CacheLimit | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the stream has a remote."""
        return self.location.remote is not None

    def lock_s(self, num_bytes: int | None = None) -> float:
        """Return how long a process may hold a file's lock."""
        return budget_s(self.location, num_bytes) + LEAST_LOCK_S

    def materialize(self, shard: Shard, folder: Path) -> bool:
        """Make a shard's raw file available in a folder; return False if it was there already.

        An OSError says that a local stream's shard cannot be unpacked in this folder.
        """
        locks, basename = FileLocks(folder, self.disk), shard.raw.basename
        num_bytes = shard.stored.num_bytes
        with locks.hold(basename, self.lock_s(num_bytes)):
            if self.verifier.verify(folder, shard.raw) is not None:
                return False
            locks.remove_leftovers(basename)
            # Inside the lock, so that waiting processes also get the error for a full disk.
            errors = as_data_error(folder / basename, num_bytes + shard.raw.num_bytes)
            with errors if self.is_remote else nullcontext():
                self._make(shard, folder, locks)
        return True

    def remove_damaged(
        self, folder: Path, damaged: FileState, basename: str, packed: str = ""
    ) -> bool:
        """Remove a damaged file of ours, and the compressed file that it was made from, if any.

        Return whether a new copy may be available; False if the file is not ours to remove.
        """
        with FileLocks(folder, self.disk).hold(basename, self.lock_s()):
            if self.disk.state(folder / basename) != damaged:
                return True  # another process has replaced it
            manifest = Manifest(folder, self.disk)
            if not manifest.has(basename):
                return False
            for name in filter(None, (packed, basename)):
                if manifest.has(name):
                    self.disk.remove(folder / name)
        return True

    def _make(self, shard: Shard, folder: Path, locks: FileLocks) -> None:
        if self._is_kept(folder, shard.raw):
            return
        files = shard.files if self.is_remote else (shard.raw,)
        if self.limit is not None:
            self.limit.reserve(folder, [file for file in files if self._is_missing(folder, file)])
        if self.is_remote and not self.owner.claim():  # the folder may have been deleted
            self.owner.refuse_others()
        # Read before the fetch, so that a replacement during it is noticed later.
        origin = self.verifier.origin(shard)
        if origin:
            self.verifier.raise_if_rewritten()
        # Both temporary names use the raw file's name, because its lock guards them.
        name, verifier = shard.raw.basename, self.verifier
        try:
            with locks.temporary(name) as raw, locks.temporary(name) as packed:
                if shard.packed is None:
                    self._fetch(shard, raw, None)
                else:
                    self._fetch_and_unpack(shard, shard.packed, packed, raw)
                self.publish(raw, folder, name, verifier.expected(shard.raw), origin)
                keeps_packed = bool(self.location.stream.safe_keep_zip)
                if shard.packed and keeps_packed and self.disk.state(packed) is not None:
                    expected = verifier.expected(shard.packed)
                    to = self.location.folder
                    self.publish(packed, to, shard.packed.basename, expected, origin)
        finally:
            for file in files:
                with suppress(OSError):
                    if self._is_missing(folder, file):
                        Manifest(folder, self.disk).remove(file.basename)

    def _is_missing(self, folder: Path, file: ShardFile) -> bool:
        return self.disk.state(folder / file.basename) is None

    def _is_kept(self, folder: Path, file: ShardFile) -> bool:
        """Remove a damaged file of ours; return whether a file of another program is complete.

        A damaged file of another program is an error: it is not ours to remove.
        """
        if self._is_missing(folder, file):
            return False
        path = folder / file.basename
        if not Manifest(folder, self.disk).has(file.basename):
            self.verifier.raise_if_damaged(path, file)
            return True
        self.disk.remove(path)
        return False

    def _fetch_and_unpack(self, shard: Shard, file: ShardFile, packed: Path, raw: Path) -> None:
        """Unpack the local compressed file, fetching it first if it is missing or damaged."""
        folder = self.location.folder
        source = folder / file.basename
        if not self.is_remote or self.verifier.verify(folder, file) is not None:
            self.verifier.raise_if_damaged(source, file)
            try:
                with attach_uri(source, file.basename):
                    self._unpack(source, str(source), shard, raw)
                return
            except DataError:
                if not self.is_remote:
                    raise
        # Its size and hash (if any) match, but it does not unpack: refused if not ours.
        if self._is_kept(folder, file):
            raise DataError(
                f"{source}: does not unpack to what index.json says, and streampack did not put it "
                "there; delete it, so that it can be fetched",
                uri=str(source),
                shard=file.basename,
            )
        self._fetch(shard, packed, lambda path: self._unpack(path, file.basename, shard, raw))

    def _unpack(self, source: Path, where: str, shard: Shard, raw: Path) -> None:
        # Hashed in the same pass: a second pass over the file would cost half as much as unpacking.
        digest = Digest(self.verifier.expected(shard.raw))
        with self.disk.open(source) as file:
            self.disk.write(raw, digest.of(decompress_pieces(file, where, shard)))
        problem = self.verifier.problem(raw, shard.raw, digest.text)
        if problem is not None:
            raise DataError(f"{where}: unpacked, {problem}; write the stream again")

    def _fetch(self, shard: Shard, to: Path, unpack: Callable[[Path], None] | None) -> None:
        """Fetch a file until it is undamaged; a compressed one is verified by unpacking it."""
        file = shard.stored
        failures: list[OSError] = []

        def check(path: Path) -> None:
            """Refuse a damaged file, so that the download tries again."""
            failures.clear()
            try:
                problem = self.verifier.problem(path, file)
                if problem is not None:
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
            is_hashed=self.verifier.is_hashed(shard),
        )
        if failures:
            raise failures[0]

    def publish(
        self, temporary: Path, folder: Path, basename: str, hash_: str, origin: str
    ) -> None:
        """Rename a file to its final name, recorded as ours; hash and origin as in CacheEntry."""
        state = self.disk.state(temporary)
        if state is None:
            raise FileNotFoundError(f"{temporary} was removed before it got its final name")
        boot_id = self.verifier.boot_id(folder)
        entry = CacheEntry.of(state, hash_=hash_, boot_id=boot_id, origin=origin)
        # In this order: a file of ours without an entry would be taken for another program's.
        Manifest(folder, self.disk).write(basename, entry)
        self.disk.rename(temporary, folder / basename)
