"""The cache of one stream's shards on this node: fetch, verify, decompress, then rename.

::

    file, map --> whole? (verify.py) --no--> materialize.py: lock, fetch, check, unpack, note,
                                             rename
    mark_planned, mark_finished --> times of notes, the eviction order (eviction.py)

Cost: one copy per shard and node; in each process a few `stat` calls per open, and one read of
a note at the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from streampack.errors import DataError
from streampack.mds.index import Shard
from streampack.storage.eviction import CacheLimit
from streampack.storage.filesystem import FileState, LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import NOTES_FOLDER, FileLocks
from streampack.storage.materialize import Downloader, ShardMaterializer, lock_of_shard_s
from streampack.storage.metadata import StreamMetadata
from streampack.storage.names import PACKED, shard_name
from streampack.storage.verify import FileVerifier, as_data_error, raise_if_changed
from streampack.types import ByteArray

TOUCH_S = 1.0
MAX_REMOVED = 10

HASH_SHARDS = (
    "let `streampack index` write hashes into the length file, or write the stream with hashes, "
    "e.g. write_stream(hashes=['xxh64'])"
)
HASH_PARTS = (
    "let `streampack index FILES --out FOLDER` write them, and set index=FOLDER of TokenFiles"
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CachedFile(NamedTuple):
    """One version of a shard's raw file.

    It is a key of dicts and has built-in types only. Their hashes and comparisons run no Python
    code, so that a signal handler cannot raise in the middle of a dict's own work.
    """

    path: str
    state: FileState


class MappedShard(NamedTuple):
    """A shard's raw bytes."""

    data: ByteArray
    file: CachedFile
    uri: str
    is_gone: Callable[[], bool] | None
    """Returns whether the file was removed, so that only the mapping still takes its disk space;
    None if files are never evicted.
    """


class ShardCache:
    """The shards of one stream, fetched to this node on demand; safe to pickle.

    Without a `disk` and a `store`, it uses this machine's disk and the stream's own downloader.
    """

    def __init__(
        self,
        location: StreamLocation,
        disk: LocalFilesystem | None = None,
        store: Downloader | None = None,
    ) -> None:
        self.location = location
        self.folder = location.folder
        """The folder of the stream's local files."""
        self.is_remote = location.remote is not None
        """Whether shards may have to be fetched from a remote."""
        self.needs_fetch = self.is_remote
        """Whether shards may have to be fetched, or had to be decompressed at the last `check`."""
        self._disk = disk = disk or LocalFilesystem()
        store = store or Downloader()
        self._verifier = verifier = FileVerifier(location, disk)
        self._materializer = ShardMaterializer(
            location=location, disk=disk, store=store, verifier=verifier
        )
        self.metadata = StreamMetadata(location, disk, store, verifier)
        """The stream's index.json and length file."""
        self._cache = location.folder if self.is_remote else location.folder / NOTES_FOLDER
        self._names: dict[str, str] = {}
        self._touched_s: dict[str, float] = {}
        # State of a local stream's files without hashes, as of when the stream was opened.
        self._at_start: dict[str, FileState] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_touched_s": {}, "_names": {}}

    def check(self, shards: Sequence[Shard]) -> None:
        """Remove leftovers of dead processes, and compare the local files with index.json.

        All files of a local stream must exist with the sizes in index.json; one `stat` each. A
        DataError says that a file is missing or has another size, or that `Download(hash=)` names a
        hash that index.json lacks.
        """
        self._names = {}
        with suppress(OSError):
            FileLocks(self._cache, self._disk).sweep()
        for shard in shards if self._verifier.validate_hash else ():
            self._verifier.expected(shard.stored, is_validated=True)
        if not self.is_remote:
            waiting = [
                self._is_packed_only(number, shard) and not self.is_here(shard)
                for number, shard in enumerate(shards)
            ]
            self.needs_fetch = any(waiting)
            return
        num_bare = sum(not shard.is_hashed for shard in shards)
        if num_bare:
            logger.warning(
                "%s: has no hashes for %d of %d shards, so flipped bits in them cannot be "
                "detected; %s",
                self.location.remote if self.location.parts else self.location.index_uri,
                num_bare,
                len(shards),
                HASH_PARTS if self.location.parts else HASH_SHARDS,
            )

    def _is_packed_only(self, number: int, shard: Shard) -> bool:
        file, field = shard.raw, "raw_data"
        path = self.folder / file.basename
        with as_data_error(path):
            state = self._disk.state(path)
            if state is None and shard.packed is not None:
                file, field = shard.packed, "zip_data"
                path = self.folder / file.basename
                state = self._disk.state(path)
            if state is not None and state.num_bytes == file.num_bytes:
                if not shard.is_hashed:
                    self._at_start[file.basename] = state
                return file is not shard.raw
        where = f" ({self.location.index_uri}: shards.{number}.{field})"
        self._verifier.raise_if_damaged(path, file, where)
        return True

    def keep_within(self, limit: CacheLimit) -> None:
        self.needs_fetch = True  # files here now may be evicted
        self._materializer = replace(self._materializer, limit=limit)

    @property
    def is_limited(self) -> bool:
        return self._materializer.limit is not None

    def cache_folders(self, shards: Iterable[Shard]) -> tuple[Path, ...]:
        """Return the folders of files of these shards that we created, if there can be any."""
        one = next(filter(self._is_cached, shards), None)
        if one is None or one.raw.make is None:
            return () if one is None else (self._cache,)
        return tuple(self._cache / f"{number:02x}" for number in range(256))

    def _folder_of(self, shard: Shard) -> Path:
        """Return the folder of a shard in the cache; those of many shards have subfolders."""
        name = shard.raw.basename[:2] if shard.raw.make else ""
        return self._cache / name

    def _is_cached(self, shard: Shard) -> bool:
        return self.is_remote or shard.packed is not None

    def _name_of(self, shard: Shard) -> str:
        key = shard.raw.basename
        if key not in self._names:
            tied = self._at_start.get(shard.stored.basename) or self.metadata.version
            self._names[key] = shard_name(shard, tied)
        return self._names[key]

    def _paths_of(self, shard: Shard) -> list[tuple[Path, bool]]:
        """Return the paths that may hold a shard's raw file, and whether each is in a cache."""
        paths = [] if self.is_remote else [(self.folder / shard.raw.basename, False)]
        if self._is_cached(shard):
            paths.append((self._folder_of(shard) / self._name_of(shard), True))
        return paths

    def is_here(self, shard: Shard) -> bool:
        """Return whether a shard's raw file exists with the right size; usually one `stat`."""
        for path, _ in self._paths_of(shard):
            with suppress(OSError):
                state = self._disk.state(path)
                if state is not None and shard.raw.has_size(state.num_bytes):
                    return True
        return False

    def is_free(self, shard: Shard) -> bool:
        try:
            locks = FileLocks(self._folder_of(shard), self._disk)
            with locks.try_hold(self._name_of(shard)) as is_held:
                return is_held
        except OSError:
            return True  # no lock yet, or the fetching process will report the error

    def map(self, shard: Shard, file: CachedFile | None = None) -> MappedShard:
        """Return a shard's raw bytes, verified and fetched if necessary; raise as `file`.

        The `file` that `file` returned a moment ago is not verified again.
        """
        if file is not None:
            with suppress(FileNotFoundError):  # it was removed or replaced since
                return self._map(shard, file)
        return self._until_present(shard, lambda shard: self._map(shard, self._file(shard)[0]))

    def _map(self, shard: Shard, file: CachedFile) -> MappedShard:
        path = Path(file.path)
        with as_data_error(path):
            data = self._disk.map(path)
            is_same = self._disk.state(path) == file.state
        if len(data) != file.state.num_bytes or not is_same:
            raise FileNotFoundError(f"{path} was replaced while it was opened")
        is_gone = partial(self._is_gone, path, file.state.inode) if self.is_limited else None
        return MappedShard(data, file, self.location.uri(shard.raw.basename), is_gone)

    def _is_gone(self, path: Path, inode: int) -> bool:
        try:
            state = self._disk.state(path)
        except OSError:
            return False
        return state is None or state.inode != inode

    def file(self, shard: Shard) -> CachedFile:
        """Return a shard's raw file and its version, verified and fetched if necessary.

        A DataError says that the shard cannot be fetched, or does not match index.json.
        """
        return self._until_present(shard, self._file)[0]

    def fetch(self, shard: Shard) -> int:
        """Fetch a shard's raw file if necessary, as `file`; return the bytes of the fetched file.

        They are 0 if the shard was already here.
        """
        file, is_new = self._until_present(shard, self._file)
        num_bytes = file.state.num_bytes if shard.raw.make else shard.stored.num_bytes
        return num_bytes if is_new else 0

    def _until_present(self, shard: Shard, call: Callable[[Shard], _T]) -> _T:
        # The file may be removed between two steps, by eviction or by hand.
        basename = shard.raw.basename
        for _ in range(MAX_REMOVED):
            try:
                return call(shard)
            except FileNotFoundError as error:
                failure = error
        raise DataError(
            f"{self.folder / basename}: was removed {MAX_REMOVED} times before it could be used "
            f"({failure}); find out what removes files there, or raise Buffers(cache_limit=...)",
            uri=self.location.uri(basename),
            shard=basename,
        ) from failure

    def _file(self, shard: Shard) -> tuple[CachedFile, bool]:
        is_new, state = False, None
        for path, is_cached in self._paths_of(shard):
            state = self._verifier.verify(path, shard.raw, is_cached=is_cached)
            if state is not None:
                break
        else:
            path, is_new = self._materialize(shard)
            state = self.file_state(path)
        for basename in {shard.raw.basename, shard.stored.basename} & self._at_start.keys():
            source = self.folder / basename
            raise_if_changed(source, self._at_start[basename], self.file_state(source))
        if state is None:
            raise FileNotFoundError(f"{path} was removed while it was opened")
        return CachedFile(str(path), state), is_new

    def file_state(self, path: Path) -> FileState | None:
        """Return the state that identifies a file's version; None if it does not exist."""
        with as_data_error(path):
            return self._disk.state(path)

    def _materialize(self, shard: Shard) -> tuple[Path, bool]:
        if not self.is_remote:
            path = self.folder / shard.raw.basename
            if shard.packed is None or self.file_state(path) is not None:
                self._verifier.raise_if_damaged(path, shard.raw)
                return path, False
        raw, packed = self._cached_paths(shard, self._folder_of(shard))
        num_bytes = shard.stored.num_bytes + shard.raw.num_bytes
        # A stream that is read in place has its cache below it.
        elsewhere = "" if self.is_remote else f"remote={str(self.folder)!r} and "
        with as_data_error(raw, num_bytes, elsewhere=elsewhere):
            return raw, self._materializer.materialize(shard, raw, packed)

    def _cached_paths(self, shard: Shard, folder: Path) -> tuple[Path, Path]:
        name = self._name_of(shard)
        return folder / name, folder / f"{name}{PACKED}"

    def remove_damaged(self, shard: Shard, damaged: CachedFile) -> bool:
        """Remove a damaged raw file that we created; return whether there may be a new copy."""
        path = Path(damaged.path)
        if (path, True) not in self._paths_of(shard):
            return False
        locks = FileLocks(path.parent, self._disk)
        with (
            as_data_error(path, is_retried=False),
            locks.hold(path.name, lock_of_shard_s(self.location, shard.stored)),
        ):
            if self._disk.state(path) == damaged.state:
                for each in self._cached_paths(shard, path.parent):
                    self._disk.remove(each)
        return True

    def mark_planned(self, shards: Iterable[Shard]) -> None:
        now_s = self._disk.now_s()
        for shard in shards:
            name = shard.raw.basename
            if not 0 <= now_s - self._touched_s.get(name, 0.0) < TOUCH_S:
                self._touched_s[name] = now_s
                self._touch(shard, now_s)

    def mark_finished(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            self._touched_s.pop(shard.raw.basename, None)
            self._touch(shard, 0.0)

    def mark_spare(self, shards: Iterable[Shard]) -> None:
        """Record that shards may be evicted once none is left that is finished."""
        for shard in shards:
            self._touch(shard, self._disk.now_s() / 2)  # long before any that is planned

    def _touch(self, shard: Shard, time_s: float) -> None:
        locks = FileLocks(self._folder_of(shard), self._disk)
        for ending in ("", PACKED) if self._is_cached(shard) else ():
            with suppress(OSError):
                self._disk.touch(locks.entry_path(f"{self._name_of(shard)}{ending}"), time_s)
