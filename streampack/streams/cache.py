"""A stream's files on this node: fetched, checked, decompressed, and only then given their names.

::

    path, map --> whole? (checked.py) --no--> bring.py: lock, fetch, check, unpack, record, rename
    planned, finished --> the times of records, which say who goes first (eviction.py)

A file with its final name is whole: a killed process leaves only temporary names, lock files and
notes in `.streampack`, which a later start removes. A file that lies there already is checked when
a process first uses it; if it is damaged and streampack had put it there, it is brought again.
Files of others are never removed nor replaced. A local stream's compressed shards are unpacked
beside them, or, where that folder cannot be written, in a folder of this user's under the system's
temporary one.

Cost: one copy per shard and node; in each process one `stat` per opening, and a record read at the
first. Where the remote is a folder, its index.json is read at every opening of the stream, to see
that it still is the one that was fetched; a store is not asked again.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.bring import ShardBringer, Store
from streampack.streams.checked import CheckedFiles, naming, typed_errors
from streampack.streams.disk import Disk
from streampack.streams.eviction import CacheLimit, Home
from streampack.streams.fetch import DamagedError
from streampack.streams.files import StreamFiles
from streampack.streams.index import MdsIndex, Shard, parse_index
from streampack.streams.lengths import LENGTH_FILE
from streampack.streams.locks import FileLocks
from streampack.streams.mds import ByteArray
from streampack.streams.records import Records

__all__ = ["ShardCache"]

TOUCH_S = 1.0
MAX_REMOVED = 10
NAMED_SPLITS = 8  # in a message

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ShardCache:
    """The files of one stream, brought to this node when they are asked for; safe to pickle.

    Args:
        files: Where the stream's files are.
        disk: What its local folder lies on.
        store: How its files are fetched.
    """

    def __init__(
        self, files: StreamFiles, disk: Disk | None = None, store: Store | None = None
    ) -> None:
        self._files = files
        self._disk = disk or Disk()
        self._checked = CheckedFiles(files, self._disk, self.index_uri)
        self._bringer = ShardBringer(
            files=files, disk=self._disk, store=store or Store(), checked=self._checked
        )
        self._locks = FileLocks(files.folder, self._disk)
        self._needs_fetch = self.is_remote
        self._uses_scratch = False
        self._touched_s: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_touched_s": {}, "_uses_scratch": False}

    @property
    def is_remote(self) -> bool:
        """Whether shards may have to be fetched from elsewhere."""
        return self._files.remote is not None

    @property
    def needs_fetch(self) -> bool:
        """Whether shards may have to be fetched, or had to be decompressed when it was checked."""
        return self._needs_fetch

    @property
    def folder(self) -> Path:
        """The local folder, the split included."""
        return self._files.folder

    @property
    def index_uri(self) -> str:
        """Where the stream's index.json is, for messages."""
        return self.uri(mosaic.get_index_basename())

    def uri(self, basename: str) -> str:
        """Return where a file of the stream comes from, for messages."""
        return os.path.join(self._files.remote or self._files.folder, basename)

    def index_bytes(self) -> bytes:
        """Return the bytes of index.json, fetched at the first call on this node.

        Raises:
            DataError: If there is none, or a remote folder holds another one by now.
        """
        basename = mosaic.get_index_basename()
        path = self._files.folder / basename
        with typed_errors(path, is_tried_again=False):
            text = self._read(path)
            if text is None and not self.is_remote:
                raise DataError(
                    f"{path}: there is no such file; {self._splits()}give the folder of an MDS "
                    "stream as local=, or set remote= to where it can be fetched"
                )
            if text is None:
                with self._locks.hold(basename, self._bringer.lock_s(None)):
                    text = self._read(path) or self._fetch_index(path, basename)
        self._check_version(text)
        return text

    def _splits(self) -> str:
        """Return what to say of subfolders that hold a stream."""
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
        read: list[bytes] = []

        def check(fetched: Path) -> None:
            # One that cannot be used must not get its name: the next start would find it there.
            read[:] = [self._read(fetched) or b""]
            try:
                parse_index(read[0], uri)
            except DataError as error:
                raise DamagedError(str(error).removeprefix(f"{uri}: ")) from error

        try:
            self._bringer.store.fetch(self._files, basename, temporary, check=check)
            self._disk.rename(temporary, path)
        finally:
            self._bringer.discard(temporary)
        return read[0]

    def _check_version(self, text: bytes) -> None:
        """Refuse a cache of another stream than the remote holds now, where a look is free."""
        folder = self._files.remote_folder
        if folder is None:
            return
        try:
            there = self._read(folder / mosaic.get_index_basename())
        except OSError:
            return  # what was fetched does without its remote
        if there is not None and there != text:
            raise DataError(
                f"{self.folder}: was fetched from another version of {folder}: index.json is "
                f"{_fingerprint(text)} here, {_fingerprint(there)} there; delete {self.folder}, "
                "or name another local=",
                uri=self.index_uri,
            )

    def length_file_path(self) -> Path | None:
        """Return the stream's length file, fetched if the remote has one; None if there is none.

        Raises:
            DataError: If the store neither gives it nor says that there is none.
        """
        path = self._files.folder / LENGTH_FILE
        with typed_errors(path, is_tried_again=False):
            if self._disk.state(path) is not None or not self.is_remote:
                return path if self._disk.state(path) is not None else None
            locks = self._locks
            with locks.hold(LENGTH_FILE, self._bringer.lock_s(None)):
                if self._disk.state(path) is None:
                    temporary = locks.temporary(LENGTH_FILE)
                    try:
                        if not self._bringer.store.fetch_if_there(
                            self._files, LENGTH_FILE, temporary
                        ):
                            return None
                        self._disk.rename(temporary, path)
                    finally:
                        self._bringer.discard(temporary)
            return path

    def check(self, index: MdsIndex) -> None:
        """Remove what dead processes left, and compare what lies here with index.json.

        A local stream's files must all be there, with the sizes of index.json; one `stat` each.

        Raises:
            DataError: If a local file is missing or of another size, or `validate_hash` names a
                hash that index.json has not.
        """
        with suppress(OSError):
            self._locks.sweep()
        parts = [shard.packed or shard.raw for shard in index.shards]
        hashes = [self._checked.wanted(part, is_asked=True) for part in parts]
        if self.is_remote:
            if not all(hashes):
                logger.warning(
                    "%s: has no hashes for %d of %d shards, so flipped bits in them cannot be "
                    "seen; write the stream with hashes, e.g. write_stream(hashes=['xxh64'])",
                    self.index_uri,
                    hashes.count(""),
                    len(hashes),
                )
            return
        missing = [self._is_packed_only(i, shard) for i, shard in enumerate(index.shards)]
        self._needs_fetch = any(missing)

    def _is_packed_only(self, number: int, shard: Shard) -> bool:
        """Return whether a local shard has yet to be unpacked; refuse it if it cannot be."""
        path = self.folder / shard.raw.basename
        with typed_errors(path):
            state = self._disk.state(path)
            if state is not None and state.num_bytes == shard.raw.num_bytes:
                return False
            part, field = shard.raw, "raw_data"
            is_ours = state is not None and Records(self.folder, self._disk).has(part.basename)
            if shard.packed is not None and (state is None or is_ours):
                part, field = shard.packed, "zip_data"
                path = self.folder / part.basename
                state = self._disk.state(path)
                if state is not None and state.num_bytes == part.num_bytes:
                    return True
        self._checked.refuse(path, part, f" ({self.index_uri}: shards.{number}.{field})")
        return True

    def under(self, limit: CacheLimit) -> ShardCache:
        """Return the same cache, whose files take no more room than a limit."""
        limited = copy.copy(self)
        limited._touched_s = {}
        limited._needs_fetch = True  # what is here today may go
        limited._bringer = replace(self._bringer, limit=limit)
        return limited

    @property
    def is_limited(self) -> bool:
        """Whether files of ours may be removed to make room."""
        return self._bringer.limit is not None

    def homes(self, index: MdsIndex) -> list[Home]:
        """Return where files of ours may lie."""
        if not self.is_remote and all(shard.packed is None for shard in index.shards):
            return []
        folders = [self.folder] if self.is_remote else [self.folder, self._scratch]
        return [Home(folder=folder, shards=index.shards) for folder in folders]

    @property
    def _scratch(self) -> Path:
        """A folder of this user's own for what cannot be written beside the stream."""
        place = hashlib.blake2s(os.fsencode(self.folder.absolute()), digest_size=16)
        root = Path(tempfile.gettempdir(), f"streampack-{os.getuid()}")
        return root / place.hexdigest()

    def _homes_of(self, shard: Shard) -> tuple[Path, ...]:
        """Return where a shard's raw file may lie, in order of preference."""
        if self.is_remote or shard.packed is None:
            return (self.folder,)
        return (self.folder, self._scratch)

    def is_here(self, shard: Shard) -> bool:
        """Return whether a shard's raw file is here, of the right size; mostly one `stat`."""
        for home in self._homes_of(shard):
            with suppress(OSError):
                state = self._disk.state(home / shard.raw.basename)
                if state is not None and state.num_bytes == shard.raw.num_bytes:
                    return True
        return False

    def is_free(self, shard: Shard) -> bool:
        """Return whether nobody brings a shard at this moment."""
        try:
            with self._locks.try_hold(shard.raw.basename) as is_held:
                return is_held
        except OSError:
            return True  # there is no lock yet, or whoever brings the shard will say what is wrong

    def map(self, shard: Shard) -> tuple[ByteArray, Callable[[], bool] | None]:
        """Return a shard's raw bytes, brought here if need be.

        Returns:
            The bytes, shape (num_bytes,), and what tells whether the file has left its folder since
            then, so that whoever maps it keeps the room; None where files stay.

        Raises:
            DataError: If it cannot be had, or is not what index.json says.
        """
        return self._until_there(shard, self._map)

    def _map(self, shard: Shard) -> tuple[ByteArray, Callable[[], bool] | None]:
        path = self._path(shard)
        with typed_errors(path):
            state = self._disk.state(path) if self.is_limited else None
            data = self._disk.map(path)
        if len(data) != shard.raw.num_bytes:
            raise FileNotFoundError(f"{path} was replaced while it was opened")
        return data, partial(self._is_gone, path, state.inode) if state is not None else None

    def path(self, shard: Shard) -> Path:
        """Return the raw file of a shard, brought here if need be, and checked.

        Raises:
            DataError: If it cannot be had, or is not what index.json says.
        """
        return self._until_there(shard, self._path)

    def _until_there(self, shard: Shard, call: Callable[[Shard], _T]) -> _T:
        # Between two steps somebody may remove the file, to make room or by hand.
        for _ in range(MAX_REMOVED):
            try:
                with naming(self.uri(shard.raw.basename), shard.raw.basename):
                    return call(shard)
            except FileNotFoundError as error:
                failure = error
        raise DataError(
            f"{self.folder / shard.raw.basename}: was removed {MAX_REMOVED} times before it could "
            f"be used ({failure}); see what removes files there, or raise Buffers(cache_limit=...)",
            uri=self.uri(shard.raw.basename),
            shard=shard.raw.basename,
        ) from failure

    def _path(self, shard: Shard) -> Path:
        path = self.folder / shard.raw.basename
        if self._checked.is_whole(self.folder, shard.raw):
            return path
        if shard.packed is None and not self.is_remote:
            self._checked.refuse(path, shard.raw)
            return path
        if self.is_remote:
            with typed_errors(path, shard.raw.num_bytes):
                return self._bringer.bring(shard, self.folder)
        return self._unpacked(shard)

    def _unpacked(self, shard: Shard) -> Path:
        """Return a local stream's unpacked shard, where there is room to unpack it."""
        scratch = self._scratch
        path = scratch / shard.raw.basename
        if self._uses_scratch and self._checked.is_whole(scratch, shard.raw):
            return path
        try:
            return self._bringer.bring(shard, self.folder)
        except OSError as error:
            logger.debug("%s: cannot be written: %s", self.folder, error)
        with typed_errors(path, shard.raw.num_bytes):
            # The system's temporary folder is everybody's: another user may have taken the name.
            self._disk.make_folder(scratch.parent, is_private=True)
            if not self._uses_scratch:
                FileLocks(scratch, self._disk).sweep()
                self._uses_scratch = True
            return self._bringer.bring(shard, scratch)

    def _is_gone(self, path: Path, inode: int) -> bool:
        try:
            state = self._disk.state(path)
        except OSError:
            return False
        return state is None or state.inode != inode

    def planned(self, shards: Iterable[Shard]) -> None:
        """Note that these shards will be read soon; nothing without a limit."""
        now_s = self._disk.now_s()
        for shard in shards if self.is_limited else ():
            name = shard.raw.basename
            if not 0 <= now_s - self._touched_s.get(name, 0.0) < TOUCH_S:
                self._touched_s[name] = now_s
                self._touch(shard, now_s)

    def finished(self, shards: Iterable[Shard]) -> None:
        """Note that these shards may go first; nothing without a limit."""
        for shard in shards if self.is_limited else ():
            self._touched_s.pop(shard.raw.basename, None)
            self._touch(shard, 0.0)

    def _touch(self, shard: Shard, time_s: float) -> None:
        for home in self._homes_of(shard):
            records = Records(home, self._disk)
            for part in (shard.raw, shard.packed):
                if part is not None:
                    with suppress(OSError):
                        self._disk.touch(records.path(part.basename), time_s)


def _fingerprint(content: bytes) -> str:
    return hashlib.blake2s(content, digest_size=4).hexdigest()
