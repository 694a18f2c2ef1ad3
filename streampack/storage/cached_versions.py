"""What a `local` folder contains: remotes, versions of their streams, and shards.

::

    local/*/.streampack/last --> the remotes' folders --> index.<version>.json --> names of shards
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streampack.errors import DataError
from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE, open_length_file
from streampack.storage.eviction import evict, shards_in
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.locks import NOTES_FOLDER
from streampack.storage.metadata import last_version
from streampack.storage.names import LAST, PACKED, shard_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedVersion:
    """One version of a remote's stream in a cache."""

    name: str
    is_last: bool
    """Whether it is opened at the next start."""
    files: frozenset[str]
    """Names of its shards' files that are here; versions may share them."""
    num_shards: int
    """Number of its shards, here or not."""
    num_here: int
    """Number of its shards with their raw file here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRemote:
    """The folder of one remote in a `local`."""

    remote: str
    folder: Path
    versions: tuple[CachedVersion, ...]
    sizes: dict[str, int]
    """Bytes of all shards' files here."""

    def remove_old(self) -> None:
        """Remove all versions but the last; a shard that a process is fetching stays."""
        disk = LocalFilesystem()
        kept = frozenset[str]().union(*(each.files for each in self.versions if each.is_last))
        for version in self.versions:
            if not version.is_last:
                disk.remove(self.folder / f"index.{version.name}.json")
                disk.remove(self.folder / f"lengths.{version.name}.bin")
        for name in self.sizes.keys() - kept:
            evict(self.folder, name, disk)

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def cached_remotes(path: Path) -> Iterator[CachedRemote]:
    """Yield the remotes' folders in a `local`, or in several below a folder."""
    disk = LocalFilesystem()
    for note in sorted(path.rglob(f"{NOTES_FOLDER}/{LAST}")):
        folder = note.parents[1]
        last = last_version(folder, disk)
        if last is not None:
            states = {name: disk.state(folder / name) for name in shards_in(folder, disk)}
            sizes = {name: state.num_bytes for name, state in states.items() if state}
            files = sorted(folder.glob("index.*.json"), key=lambda file: file.stat().st_mtime_ns)
            names = [file.name.split(".")[1] for file in files]
            versions = tuple(_version(folder, name, last["version"], sizes) for name in names)
            yield CachedRemote(remote=last["remote"], folder=folder, versions=versions, sizes=sizes)


def _version(folder: Path, name: str, last: str, here: dict[str, int]) -> CachedVersion:
    try:
        text = (folder / f"index.{name}.json").read_bytes()
        index = parse_index(text, str(folder))
    except DataError:  # damaged: it would be refetched
        return CachedVersion(name=name, is_last=False, files=frozenset(), num_shards=0, num_here=0)
    shards = index.shards
    try:
        lengths = open_length_file(folder / f"lengths.{name}.bin", text, index)
        shards = index.with_hashes("xxh64", lengths.hashes, LENGTH_FILE).shards
    except (OSError, DataError):
        pass  # there is none
    names = {shard_name(shard, name) for shard in shards}
    return CachedVersion(
        name=name,
        is_last=name == last,
        files=frozenset(file for file in here if file.removesuffix(PACKED) in names),
        num_shards=len(shards),
        num_here=len(names & here.keys()),
    )
