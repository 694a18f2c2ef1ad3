"""A stream's files on this node: fetched, checked, decompressed, and only then given their names.

::

    remote --fetch--> .streampack/xyz.tmp --size, hash--> decompress --size--> rename --> local
                      '------------ under one lock per shard, freed by the kernel -----------'

A file with its final name is whole: a killed process leaves only temporary names and lock files
in `.streampack`, which the next one removes. Without a remote, the stream's own files are never
removed; its compressed shards are decompressed beside them, or, where that folder cannot be
written, in a folder of this user's under the system's temporary one.

Cost: one copy and one decompression per shard and node; afterwards one `stat` per opening. Where
the remote is a folder, its index.json is read at every opening of the stream, to see that it still
is the one that was fetched; a store is not asked again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.compression import decompress_shard
from streampack.streams.files import StreamFiles
from streampack.streams.index import Part, Shard
from streampack.streams.lengths import LENGTH_FILE

__all__ = ["ShardCache"]

LOCK_FOLDER = ".streampack"
LEAST_LOCK_TIMEOUT_S = 120.0


class ShardCache:
    """The files of one stream, brought to this node when they are asked for; safe to pickle.

    Args:
        files: Where the stream's files are.
    """

    def __init__(self, files: StreamFiles) -> None:
        self._files = files

    @property
    def is_remote(self) -> bool:
        """Whether shards may have to be fetched from elsewhere."""
        return self._files.remote is not None

    @property
    def folder(self) -> Path:
        """The local folder, the split included."""
        return self._files.folder

    @property
    def index_uri(self) -> str:
        """Where the stream's index.json is, for messages."""
        folder = self._files.folder if self._files.remote is None else self._files.remote
        return str(os.path.join(folder, mosaic.get_index_basename()))

    def index_bytes(self) -> bytes:
        """Return the bytes of index.json, fetched at the first call on this node.

        Raises:
            DataError: If there is none, or a remote folder holds another one by now.
        """
        basename = mosaic.get_index_basename()
        path = self._files.folder / basename
        if not path.is_file():
            if not self.is_remote:
                raise DataError(
                    f"{path}: there is no such file; give the folder of an MDS stream as local=, "
                    "or set remote= to where it can be fetched"
                )
            with self._lock(self._files.folder, basename):
                if not path.is_file():
                    self._files.fetch(basename, self._temporary(basename)).replace(path)
        text: bytes = path.read_bytes()
        self._check_version(text)
        return text

    def _check_version(self, text: bytes) -> None:
        """Refuse a cache of another stream than the remote holds now, where a look is free."""
        folder = self._files.remote_folder
        if folder is None:
            return
        try:
            there = (folder / mosaic.get_index_basename()).read_bytes()
        except OSError:
            return  # what was fetched does without its remote
        if there != text:
            raise DataError(
                f"{self.folder}: was fetched from another version of {folder}: index.json is "
                f"{_fingerprint(text)} here, {_fingerprint(there)} there; delete {self.folder}, "
                "or name another local="
            )

    def length_file_path(self) -> Path | None:
        """Return the stream's length file, fetched if the remote has one; None if there is none."""
        path = self._files.folder / LENGTH_FILE
        if path.is_file() or not self.is_remote:
            return path if path.is_file() else None
        with self._lock(self._files.folder, LENGTH_FILE):
            if not path.is_file():
                fetched = self._files.fetch_if_there(LENGTH_FILE, self._temporary(LENGTH_FILE))
                if fetched is None:
                    return None
                fetched.replace(path)
        return path

    def path(self, shard: Shard) -> Path:
        """Return the raw file of a shard, whole and of the size that index.json states.

        Raises:
            DataError: If it cannot be had, or is not what index.json says.
        """
        path = self._files.folder / shard.raw.basename
        if _has_size(path, shard.raw):
            return path
        if not self.is_remote and path.is_file():
            self._refuse_size(path, path.stat().st_size, shard.raw)
        packed = shard.packed
        if packed is None and not self.is_remote:
            raise DataError(
                f"{path}: there is no such file, and neither a compressed form of it nor a remote; "
                "copy the shard there, or set remote="
            )
        for is_beside in (True, False):
            try:
                folder = self.folder if is_beside else self._scratch_folder()
                path = folder / shard.raw.basename
                with self._lock(folder, shard.raw.basename):
                    if not _has_size(path, shard.raw):
                        self._remove_remains(folder, shard.raw.basename)
                        self._make(shard, folder)
                return path
            except OSError as error:
                failure = error
            if self.is_remote:
                break
        raise DataError(
            f"{path}: cannot be written ({failure}); {shard.raw.num_bytes} bytes are needed: "
            "free them, or set local= to a folder that can be written"
        )

    def _scratch_folder(self) -> Path:
        """Return a folder of this user's own for what cannot be written beside the stream."""
        place = hashlib.blake2s(os.fsencode(self.folder.absolute()), digest_size=16)
        root = Path(tempfile.gettempdir(), f"streampack-{os.getuid()}")
        root.mkdir(mode=0o700, exist_ok=True)
        # The system's temporary folder is everybody's: another user may have taken the name.
        if root.stat().st_uid != os.getuid():
            raise PermissionError(f"{root} belongs to another user")
        return root / place.hexdigest()

    @staticmethod
    def _remove_remains(folder: Path, basename: str) -> None:
        """Remove what a killed process left of a shard; its lock is held, so nobody writes it."""
        begin = f"{basename.replace('/', '_')}."
        for file in (folder / LOCK_FOLDER).iterdir():
            if file.name.startswith(begin) and ".tmp" in file.name:
                file.unlink(missing_ok=True)

    def _make(self, shard: Shard, folder: Path) -> None:
        """Bring one raw shard into `folder`, under the shard's lock."""
        part = shard.packed or shard.raw
        source = self._files.folder / part.basename
        fetched = None
        # Files that were there before are used if they are whole, and never removed.
        if self.is_remote and not _has_size(source, part):
            fetched = source = self._files.fetch(part.basename, self._temporary(part.basename))
        try:
            self._check(source, part)
            if shard.packed is None:
                _rename(source, folder / part.basename)
                return
            self._decompress(source, shard, folder)
            if fetched is not None and self._files.stream.safe_keep_zip:
                _rename(fetched, self._files.folder / part.basename)
        finally:
            if fetched is not None:
                fetched.unlink(missing_ok=True)

    def _decompress(self, source: Path, shard: Shard, folder: Path) -> None:
        raw = decompress_shard(source, shard)
        temporary = folder / self._temporary(shard.raw.basename)
        try:
            temporary.write_bytes(raw)
            _rename(temporary, folder / shard.raw.basename)
        finally:
            temporary.unlink(missing_ok=True)

    def _check(self, path: Path, part: Part) -> None:
        """Compare a file with what index.json says of it: the size always, a hash if asked for."""
        if not path.is_file():
            raise DataError(
                f"{path}: there is no such file, but index.json names it; "
                "copy the shard there, or set remote="
            )
        if path.stat().st_size != part.num_bytes:
            self._refuse_size(path, path.stat().st_size, part)
        algorithm = self._files.stream.validate_hash
        if not algorithm:
            return
        if algorithm not in part.hashes or algorithm not in mosaic.get_hashes():
            raise DataError(
                f"{self.index_uri}: {part.basename} has no {algorithm!r} hash, only "
                f"{sorted(part.hashes)}; set validate_hash= to one of them, or to None"
            )
        found = mosaic.get_hash(algorithm, path.read_bytes())
        if found != part.hashes[algorithm]:
            raise DataError(
                f"{self._origin(path, part)}: its {algorithm} is {found}, but index.json says "
                f"{part.hashes[algorithm]}; the bytes are damaged: copy or write the shard anew"
            )

    def _refuse_size(self, path: Path, num_bytes: int, part: Part) -> None:
        raise DataError(
            f"{self._origin(path, part)}: has {num_bytes} bytes, but index.json says "
            f"{part.num_bytes}; the shard was cut short or changed: copy or write it anew"
        )

    def _origin(self, path: Path, part: Part) -> str:
        if self._files.remote is None or LOCK_FOLDER not in path.parts:
            return str(path)
        return os.path.join(self._files.remote, part.basename)

    @staticmethod
    def _temporary(basename: str) -> str:
        name = basename.replace("/", "_")
        return os.path.join(LOCK_FOLDER, f"{name}.{uuid.uuid4().hex}.tmp")

    @contextmanager
    def _lock(self, folder: Path, basename: str) -> Iterator[None]:
        locks = folder / LOCK_FOLDER
        locks.mkdir(parents=True, exist_ok=True)
        stream = self._files.stream
        timeout_s = max(LEAST_LOCK_TIMEOUT_S, stream.download_timeout * (stream.download_retry + 2))
        path = locks / f"{basename.replace('/', '_')}.lock"
        try:
            with FileLock(path, timeout=timeout_s):
                yield
        except Timeout as error:
            raise DataError(
                f"{path}: another process has held this lock for {timeout_s:.0f} s; see whether it "
                "hangs, or raise download_timeout= if its downloads are only slow"
            ) from error


def _rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def _fingerprint(content: bytes) -> str:
    return hashlib.blake2s(content, digest_size=4).hexdigest()


def _has_size(path: Path, part: Part) -> bool:
    try:
        return path.stat().st_size == part.num_bytes
    except (FileNotFoundError, NotADirectoryError):
        return False
