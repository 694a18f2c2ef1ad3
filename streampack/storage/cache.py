"""The cache of one stream's files on this node: fetch, verify, decompress, then rename.

::

    index.json --> this remote's folder? (owner.py) --no--> refused
    file, map --> whole? (verify.py) --no--> materialize.py: lock, fetch, check, unpack, record,
                                             rename
    planned, finished --> manifest entry times, the eviction order (eviction.py)

A file under its final name is complete. A killed process leaves only temporary files, lock files
and notes in `.streampack`, which a later start removes. An existing file is verified when a process
first uses it. If it is damaged and streampack created it, it is fetched again. Files that
streampack did not create are never removed or replaced. Compressed shards of a local stream are
unpacked next to the originals. If that folder is not writable, they are unpacked in a private
folder under the system's temporary folder.

Cost: one copy per shard and node; in each process a few `stat` calls per open, and one read of
a manifest entry at the first. If the remote is a folder, its index.json is read and compared
whenever the stream is opened. An object store is checked again only with `check_remote`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from streampack.errors import DataError
from streampack.mds import mosaic
from streampack.mds.columns import ByteArray
from streampack.mds.index import MdsIndex, Shard, parse_index
from streampack.mds.length_file import LENGTH_FILE, index_digest
from streampack.storage.download_errors import DamagedError
from streampack.storage.eviction import CacheFolder, CacheLimit
from streampack.storage.filesystem import FileState, LocalFilesystem, private_root
from streampack.storage.location import StreamLocation
from streampack.storage.locks import FileLocks
from streampack.storage.manifest import Manifest
from streampack.storage.materialize import Downloader, ShardMaterializer
from streampack.storage.owner import CacheOwner
from streampack.storage.verify import FileVerifier, as_data_error, attach_uri

TOUCH_S = 1.0
MAX_REMOVED = 10
NAMED_SPLITS = 8  # in a message

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CachedFile(NamedTuple):
    """One version of a shard's raw file; hashable."""

    path: Path
    """Path of the file."""
    state: FileState
    """Identifies the version; the inode is 0 on a network file system."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The same in built-in types, for dicts.

        Their hashes and comparisons run no Python code, so that a signal handler cannot raise in
        the middle of a dict's own work.
        """
        state = self.state
        return str(self.path), state.num_bytes, state.mtime_ns, state.inode


class MappedShard(NamedTuple):
    """A shard's raw bytes."""

    data: ByteArray
    """The bytes, shape (num_bytes,)."""
    file: CachedFile
    """The file they were mapped from."""
    is_gone: Callable[[], bool] | None
    """Returns whether the file was removed, so that only the mapping still takes its disk space;
    None if files are never evicted.
    """


class ShardCache:
    """The files of one stream, fetched to this node on demand; safe to pickle.

    Args:
        files: Location of the stream's files.
        disk: Filesystem of the local folder.
        store: Downloads its files.
    """

    def __init__(
        self,
        files: StreamLocation,
        disk: LocalFilesystem | None = None,
        store: Downloader | None = None,
    ) -> None:
        self._files = files
        self._disk = disk or LocalFilesystem()
        self._checked = FileVerifier(files, self._disk, self.index_uri)
        self._owner = CacheOwner(files, self._disk)
        self._bringer = ShardMaterializer(
            files=files,
            disk=self._disk,
            store=store or Downloader(),
            checked=self._checked,
            owner=self._owner,
        )
        self._locks = FileLocks(files.folder, self._disk)
        self._needs_fetch = self.is_remote
        self._uses_scratch = False
        self._touched_s: dict[str, float] = {}
        # State of a local stream's files without hashes, as of when the stream was opened.
        self._at_start: dict[str, FileState] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_touched_s": {}, "_uses_scratch": False}

    @property
    def is_remote(self) -> bool:
        """Whether shards may have to be fetched from a remote."""
        return self._files.remote is not None

    @property
    def needs_fetch(self) -> bool:
        """Whether shards may have to be fetched, or had to be decompressed at the last `check`."""
        return self._needs_fetch

    @property
    def folder(self) -> Path:
        """The local folder, including the split."""
        return self._files.folder

    @property
    def index_uri(self) -> str:
        """The origin of the stream's index.json, for messages."""
        return self.uri(mosaic.get_index_basename())

    def uri(self, basename: str) -> str:
        """Return the origin of one of the stream's files, for messages."""
        return os.path.join(self._files.remote or self._files.folder, basename)

    def index_bytes(self) -> bytes:
        """Return the bytes of index.json, fetched on the first call on this node.

        Raises:
            DataError: If there is none, a remote folder now holds a different one, or the local
                folder belongs to another remote or another user.
        """
        basename = mosaic.get_index_basename()
        path = self._files.folder / basename
        with as_data_error(path, is_tried_again=False):
            self._own_temporary_root()
            self._owner.refuse_others()
            text = self._read_index(path)
            if text is None and not self.is_remote:
                raise DataError(
                    f"{path}: there is no such file; {self._splits()}give the folder of an MDS "
                    "stream as local=, or set remote= to where it can be fetched"
                )
            is_kept = text is not None
            if text is None:
                with self._locks.hold(basename, self._bringer.lock_s(None)):
                    text = self._read_index(path) or self._fetch_index(path, basename)
            if not self._owner.claim():
                self._owner.refuse_others()
        self._check_version(text)
        if is_kept and getattr(self._files.stream, "check_remote", False):
            self._check_store(text)
        return text

    def _own_temporary_root(self) -> None:
        """Make the default folder private to this user; its name is predictable."""
        root = self._files.temporary_root
        if root is None:
            return
        try:
            self._disk.make_folder(root, is_private=True)
        except (PermissionError, FileExistsError) as error:
            raise DataError(
                f"{root}: is the folder of a stream without local=, but cannot be made this "
                f"user's own ({error}); set local= to another folder",
                uri=str(root),
            ) from error

    def _read_index(self, path: Path) -> bytes | None:
        """Return the local index.json; None if it is missing, or was fetched and is damaged."""
        text = self._read(path)
        fetched = self._owner.digest
        if text is None or fetched in ("", index_digest(text).hex()):
            return text
        logger.warning("%s: is not what was fetched from %s; fetching it again", path, self.uri(""))
        return None

    def _splits(self) -> str:
        """Return a hint naming the subfolders that hold a stream."""
        folder = Path(self._files.stream.local)
        found = sorted(path.parent.name for path in folder.glob(f"*/{mosaic.get_index_basename()}"))
        if not found:
            return ""
        which = " or ".join(f"split={name!r}" for name in found[:NAMED_SPLITS])
        return f"set {which}{', ...' if found[NAMED_SPLITS:] else ''}, whose folders hold one; or "

    def _read(self, path: Path) -> bytes | None:
        try:
            with self._disk.open(path) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _fetch_index(self, path: Path, basename: str) -> bytes:
        temporary = self._locks.temporary(basename)
        uri = self.index_uri
        read: list[tuple[bytes, MdsIndex]] = []
        seen: bytes | None = None

        def check(fetched: Path) -> None:
            # An invalid index must not get its final name: the next start would find it there.
            nonlocal seen
            before, seen = seen, self._read(fetched) or b""
            try:
                read[:] = [(seen, parse_index(seen, uri))]
            except DataError as error:
                if seen == before:  # both downloads are equal, so the remote file is wrong
                    raise
                raise DamagedError(str(error).removeprefix(f"{uri}: ")) from error

        try:
            self._bringer.store.fetch(self._files, basename, temporary, check=check)
            [(text, index)] = read
            digest, before = index_digest(text).hex(), self._owner.digest
            parts = (shard.packed or shard.raw for shard in index.shards)
            if before not in ("", digest) and not all(map(self._checked.wanted, parts)):
                raise self._other_version(before, digest)  # shards of both may have equal sizes
            if self._owner.claim(digest):
                self._disk.rename(temporary, path)
        finally:
            self._bringer.discard(temporary)
        return text

    def _check_version(self, text: bytes) -> None:
        """Refuse a cache that differs from the remote's current index.json, if checking is free."""
        folder = self._files.remote_folder
        if folder is None:
            return
        path = folder / mosaic.get_index_basename()
        try:
            state, there = self._disk.state(path), self._read(path)
        except OSError:
            return  # fetched files remain usable without the remote
        if there is not None:
            self._compare(text, there)
        self._checked.was_opened(path, state)

    def _check_store(self, text: bytes) -> None:
        """Refuse a cache that differs from the store's current index.json.

        index.json is fetched again, which works with any store; etags differ between copies.
        """
        if not self.is_remote or self._files.remote_folder is not None:
            return
        basename = mosaic.get_index_basename()
        temporary = self._locks.temporary(basename)
        try:
            with self._locks.hold(basename, self._bringer.lock_s(None)):
                there = self._fetch_again(basename, temporary)
        except (DataError, OSError) as error:
            logger.warning(
                "%s: check_remote cannot tell whether the store still holds what is kept in %s, "
                "so the run goes on with that: %s",
                self.index_uri,
                self.folder,
                error,
            )
            return
        self._compare(text, there)

    def _fetch_again(self, basename: str, temporary: Path) -> bytes:
        try:
            self._bringer.store.fetch(self._files, basename, temporary)
            return self._read(temporary) or b""
        finally:
            self._bringer.discard(temporary)

    def _compare(self, text: bytes, there: bytes) -> None:
        if there != text:
            raise self._other_version(index_digest(text).hex(), index_digest(there).hex())

    def _other_version(self, here: str, there: str) -> DataError:
        return DataError(
            f"{self.folder}: was fetched from another version of {self._files.remote}: index.json "
            f"is {here[:8]} here, {there[:8]} there; delete {self.folder}, or name another local=",
            uri=self.index_uri,
        )

    def length_file_path(self) -> Path | None:
        """Return the path of the length file, fetched if the remote has one; None if there is none.

        Raises:
            DataError: If the store neither returns it nor reports that it does not exist.
        """
        path = self._files.folder / LENGTH_FILE
        with as_data_error(path, is_tried_again=False):
            if not self.is_remote:
                return path if self._disk.state(path) is not None else None
            if not self._has_lengths(path):
                with self._locks.hold(LENGTH_FILE, self._bringer.lock_s(None)):
                    if not self._has_lengths(path) and not self._fetch_lengths():
                        return None
            return path

    def _has_lengths(self, path: Path) -> bool:
        """Return whether the length file is present and matches the remote's version."""
        if self._disk.state(path) is None:
            return False
        record = Manifest(self.folder, self._disk).read(LENGTH_FILE)
        return record is None or not self._checked.is_replaced(record)

    def _fetch_lengths(self) -> bool:
        temporary = self._locks.temporary(LENGTH_FILE)
        origin = self._checked.version(LENGTH_FILE)
        try:
            if not self._bringer.store.fetch_if_there(self._files, LENGTH_FILE, temporary):
                return False
            self._bringer.name(temporary, self.folder, LENGTH_FILE, "", origin)
        finally:
            self._bringer.discard(temporary)
        return True

    def throw_away_lengths(self, damaged: FileState | None) -> bool:
        """Remove a damaged length file that we fetched; return whether a new copy may be available.

        Args:
            damaged: The damaged version, as returned by `seen`.
        """
        if damaged is None or not self.is_remote:
            return False
        with as_data_error(self.folder / LENGTH_FILE):
            return self._bringer.throw_away(self.folder, damaged, LENGTH_FILE)

    def seen(self, path: Path) -> FileState | None:
        """Return the state that identifies a file's version; None if there is no file."""
        with as_data_error(path):
            return self._checked.seen(path)

    def check(self, index: MdsIndex) -> None:
        """Remove leftovers of dead processes, and compare the local files with index.json.

        All files of a local stream must exist with the sizes in index.json; one `stat` each.

        Raises:
            DataError: If a local file is missing or has another size, or `validate_hash` names a
                hash that index.json lacks.
        """
        with suppress(OSError):
            self._locks.sweep()
        for shard in index.shards:
            self._checked.wanted(shard.packed or shard.raw, is_asked=True)
        if self.is_remote:
            num_bare = sum(not self._checked.is_hashed(shard) for shard in index.shards)
            if num_bare:
                logger.warning(
                    "%s: has no hashes for %d of %d shards, so flipped bits in them cannot be "
                    "seen; let `streampack index` write hashes into the length file, or write the "
                    "stream with hashes, e.g. write_stream(hashes=['xxh64'])",
                    self.index_uri,
                    num_bare,
                    len(index.shards),
                )
            return
        missing = [self._is_packed_only(i, shard) for i, shard in enumerate(index.shards)]
        self._needs_fetch = any(missing)

    def _is_packed_only(self, number: int, shard: Shard) -> bool:
        """Return whether a local shard still has to be unpacked; refuse it if it cannot be."""
        path = self.folder / shard.raw.basename
        with as_data_error(path):
            state = self._disk.state(path)
            if state is not None and state.num_bytes == shard.raw.num_bytes:
                self._note(shard, state)
                return False
            part, field = shard.raw, "raw_data"
            is_ours = state is not None and Manifest(self.folder, self._disk).has(part.basename)
            if shard.packed is not None and (state is None or is_ours):
                part, field = shard.packed, "zip_data"
                path = self.folder / part.basename
                state = self._disk.state(path)
                if state is not None and state.num_bytes == part.num_bytes:
                    self._note(shard, state)
                    return True
        self._checked.refuse(path, part, f" ({self.index_uri}: shards.{number}.{field})")
        return True

    def _note(self, shard: Shard, state: FileState) -> None:
        """Record the state of a shard's source file, if no hash identifies its contents."""
        part, is_told = shard.packed or shard.raw, self._checked.wanted
        if is_told(shard.raw) or is_told(part):
            return
        path = self.folder / part.basename
        # The raw file may have been unpacked from the compressed one.
        found = self._disk.state(path) if shard.packed is not None else state
        if found is not None:
            self._at_start[part.basename] = self._checked.lasting(path.parent, found)

    def under(self, limit: CacheLimit) -> ShardCache:
        """Return a copy of this cache that is subject to a size limit."""
        limited = copy.copy(self)
        limited._touched_s = {}
        limited._needs_fetch = True  # files here now may be evicted
        limited._bringer = replace(self._bringer, limit=limit)
        return limited

    @property
    def is_limited(self) -> bool:
        """Whether files may be evicted to make room."""
        return self._bringer.limit is not None

    def homes(self, index: MdsIndex) -> list[CacheFolder]:
        """Return the folders that may hold files that we created."""
        if not self.is_remote and all(shard.packed is None for shard in index.shards):
            return []
        folders = (self.folder,) if self.is_remote else self._unpacked_homes
        return [CacheFolder(folder=folder, shards=index.shards) for folder in folders]

    @property
    def _unpacked_homes(self) -> tuple[Path, ...]:
        with suppress(PermissionError):  # reported when a shard has to be unpacked there
            return (self.folder, self._scratch)
        return (self.folder,)

    @property
    def _scratch(self) -> Path:
        """A private folder for shards that cannot be unpacked next to the stream."""
        place = hashlib.blake2s(os.fsencode(self.folder.absolute()), digest_size=16)
        return private_root() / place.hexdigest()

    def _homes_of(self, shard: Shard) -> tuple[Path, ...]:
        """Return the folders that may hold a shard's raw file, in order of preference."""
        if self.is_remote or shard.packed is None:
            return (self.folder,)
        return self._unpacked_homes

    def is_here(self, shard: Shard) -> bool:
        """Return whether a shard's raw file exists with the right size; usually one `stat`."""
        for home in self._homes_of(shard):
            with suppress(OSError):
                state = self._disk.state(home / shard.raw.basename)
                if state is not None and state.num_bytes == shard.raw.num_bytes:
                    return True
        return False

    def is_free(self, shard: Shard) -> bool:
        """Return whether no process is fetching a shard right now."""
        try:
            with self._locks.try_hold(shard.raw.basename) as is_held:
                return is_held
        except OSError:
            return True  # no lock yet, or the fetching process will report the error

    def map(self, shard: Shard) -> MappedShard:
        """Return a shard's raw bytes, fetching them if necessary.

        Raises:
            DataError: If the shard cannot be fetched, or does not match index.json.
        """
        return self._until_there(shard, self._map)

    def _map(self, shard: Shard) -> MappedShard:
        file, _ = self._file(shard)
        with as_data_error(file.path):
            state = self._disk.state(file.path) if self.is_limited else None
            data = self._disk.map(file.path)
            is_same = self._checked.seen(file.path) == file.state
        if len(data) != shard.raw.num_bytes or not is_same:
            raise FileNotFoundError(f"{file.path} was replaced while it was opened")
        is_gone = partial(self._is_gone, file.path, state.inode) if state is not None else None
        return MappedShard(data, file, is_gone)

    def file(self, shard: Shard) -> CachedFile:
        """Return a shard's raw file and its version, verified and fetched if necessary.

        Raises:
            DataError: If the shard cannot be fetched, or does not match index.json.
        """
        return self._until_there(shard, self._file)[0]

    def bring(self, shard: Shard) -> bool:
        """Fetch a shard's raw file if necessary, as `file`; return whether this call fetched it."""
        return self._until_there(shard, self._file)[1]

    def _file(self, shard: Shard) -> tuple[CachedFile, bool]:
        part = shard.packed or shard.raw
        before = self._at_start.get(part.basename)
        if before is not None and shard.packed is not None:
            source = self.folder / part.basename
            self._checked.refuse_changed(source, before, self.seen(source))
        path, is_new = self.folder / shard.raw.basename, False
        state = self._checked.whole(self.folder, shard.raw)
        if before is not None and shard.packed is None:
            self._checked.refuse_changed(path, before, state)
        if state is None:
            path, is_new = self._bring(shard)
            state = self.seen(path)
        if state is None:
            raise FileNotFoundError(f"{path} was removed while it was opened")
        return CachedFile(path, state), is_new

    def throw_away(self, shard: Shard, damaged: CachedFile) -> bool:
        """Remove a shard's damaged raw file, if we created it.

        Args:
            shard: The shard.
            damaged: The damaged version of its file.

        Returns:
            Whether a new copy may be available.

        Raises:
            DataError: If the file cannot be removed.
        """
        basename = shard.raw.basename
        packed = shard.packed.basename if shard.packed is not None else ""
        home = next(home for home in self._homes_of(shard) if home / basename == damaged.path)
        with as_data_error(damaged.path, is_tried_again=False):
            return self._bringer.throw_away(home, damaged.state, basename, packed)

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard's raw file, verified and fetched if necessary.

        Raises:
            DataError: If the shard cannot be fetched, or does not match index.json.
        """
        return self.file(shard).path

    def _until_there(self, shard: Shard, call: Callable[[Shard], _T]) -> _T:
        # The file may be removed between two steps, by eviction or by hand.
        for _ in range(MAX_REMOVED):
            try:
                with attach_uri(self.uri(shard.raw.basename), shard.raw.basename):
                    return call(shard)
            except FileNotFoundError as error:
                failure = error
        raise DataError(
            f"{self.folder / shard.raw.basename}: was removed {MAX_REMOVED} times before it could "
            f"be used ({failure}); see what removes files there, or raise Buffers(cache_limit=...)",
            uri=self.uri(shard.raw.basename),
            shard=shard.raw.basename,
        ) from failure

    def _bring(self, shard: Shard) -> tuple[Path, bool]:
        """Return the path of a shard's raw file that is missing from the stream's folder.

        The second value reports whether this call fetched or decompressed it.
        """
        path = self.folder / shard.raw.basename
        if shard.packed is None and not self.is_remote:
            self._checked.refuse(path, shard.raw)
            return path, False
        if self.is_remote:
            with as_data_error(path, shard.raw.num_bytes):
                return path, self._bringer.bring(shard, self.folder)
        return self._unpacked(shard)

    def _unpacked(self, shard: Shard) -> tuple[Path, bool]:
        """Return the path of a local stream's unpacked shard, in a folder that is writable."""
        if self._uses_scratch and self._checked.is_whole(self._scratch, shard.raw):
            return self._scratch / shard.raw.basename, False
        path = self.folder / shard.raw.basename
        try:
            is_new = self._bringer.bring(shard, self.folder)
            return self.folder / shard.raw.basename, is_new
        except OSError as error:
            logger.debug("%s: cannot be written: %s", self.folder, error)
        with as_data_error(path, shard.raw.num_bytes):
            scratch = self._scratch
            # The system's temporary folder is shared: another user may have taken the name.
            self._disk.make_folder(scratch.parent, is_private=True)
            if not self._uses_scratch:
                FileLocks(scratch, self._disk).sweep()
                self._uses_scratch = True
            return scratch / shard.raw.basename, self._bringer.bring(shard, scratch)

    def _is_gone(self, path: Path, inode: int) -> bool:
        try:
            state = self._disk.state(path)
        except OSError:
            return False
        return state is None or state.inode != inode

    def planned(self, shards: Iterable[Shard]) -> None:
        """Record that these shards will be read soon; a no-op without a limit."""
        now_s = self._disk.now_s()
        for shard in shards if self.is_limited else ():
            name = shard.raw.basename
            if not 0 <= now_s - self._touched_s.get(name, 0.0) < TOUCH_S:
                self._touched_s[name] = now_s
                self._touch(shard, now_s)

    def finished(self, shards: Iterable[Shard]) -> None:
        """Record that these shards may be evicted first; a no-op without a limit."""
        for shard in shards if self.is_limited else ():
            self._touched_s.pop(shard.raw.basename, None)
            self._touch(shard, 0.0)

    def _touch(self, shard: Shard, time_s: float) -> None:
        for home in self._homes_of(shard):
            records = Manifest(home, self._disk)
            for part in (shard.raw, shard.packed):
                if part is not None:
                    with suppress(OSError):
                        self._disk.touch(records.path(part.basename), time_s)
