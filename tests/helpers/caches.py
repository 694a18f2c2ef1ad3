"""Find the files in a cache, for tests that inspect or damage them."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from streampack.mds.index import Shard
from streampack.mds.length_file import length_file_pieces
from streampack.storage.decompress import decompress_pieces
from streampack.storage.materialize import Downloader
from tests.helpers import builders

NOTES = ".streampack"
FOLDER = re.compile(r"[0-9a-f]{16}")  # of a remote


def cache_of(local: Path) -> Path:
    """Return the folder of the only remote in a `local`."""
    (folder,) = (path for path in Path(local).iterdir() if FOLDER.fullmatch(path.name))
    return folder


def cached(local: Path, name: str) -> Path:
    """Return the only file in a cache that is a copy of `name`."""
    stem, _, suffix = name.partition(".")
    other = rf"{stem}\.[0-9a-f-]+\.{suffix}"  # index.json and lengths.bin
    pattern = re.compile(rf"{re.escape(name)}\.[0-9a-f]{{8}}|{other}")
    (path,) = (path for path in cache_of(local).iterdir() if pattern.fullmatch(path.name))
    return path


def cached_shards(local: Path) -> list[Path]:
    return sorted(cache_of(local).glob("*.mds.????????"))


def plain_name(name: str) -> str:
    """Return the name that a file in a cache has at its origin.

    >>> plain_name("shard.00000.mds.1b7e40d2"), plain_name("index.1b7e40d2-1b7e40d2.json")
    ('shard.00000.mds', 'index.json')
    """
    name = re.sub(r"^(index|lengths)\.[0-9a-f-]+\.", r"\1.", name)
    return re.sub(r"\.[0-9a-f]{8}(\.zip)?$", "", name)


def at_once(function: Any, arguments: list[Any]) -> list[Any]:
    """Call a function in several processes that start together; return what they put."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(arguments)), context.SimpleQueue()
    jobs = [context.Process(target=function, args=(*each, barrier, results)) for each in arguments]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * len(jobs)
    return [results.get() for _ in jobs]


def decompressed(path: Path, shard: Shard) -> bytes:
    """Return the raw bytes of a shard's compressed file."""
    with path.open("rb") as file:
        return b"".join(bytes(piece) for piece in decompress_pieces(file, str(path), shard))


def read_all(opened: Any) -> list[list[int]]:
    tokens = []
    for shard in range(opened.num_shards):
        data = opened.open_shard(shard)
        tokens += [data.tokens.read(data.data, i).tolist() for i in range(len(data.tokens.counts))]
    return tokens


def assert_reads(opened: Any, samples: Any) -> None:
    assert read_all(opened) == [sample.tolist() for sample in samples]


class Buckets:
    """A store that uses folders as buckets and counts the requests."""

    def __init__(self, **folders: Path) -> None:
        self.folders = folders
        self.asked: list[str] = []

    def fetch(self, files: Any, basename: str, to: Path, *, check: Any = None, **_: Any) -> None:
        self.asked.append(basename)
        folder = self.folders[files.remote.partition("://")[2].partition("/")[0]]
        to.write_bytes((folder / basename).read_bytes())
        if check is not None:
            check(to)

    def fetch_if_there(self, files: Any, basename: str, to: Path) -> bool:
        folder = self.folders[files.remote.partition("://")[2].partition("/")[0]]
        if (folder / basename).is_file():
            self.fetch(files, basename, to)
        return (folder / basename).is_file()

    @property
    def store(self) -> Downloader:
        return Downloader(fetch=self.fetch, fetch_if_there=self.fetch_if_there)


LENGTHS = [1 + (i * 37) % 300 for i in range(40)]


def write_bare(
    folder: Path, lengths: Sequence[int] = LENGTHS, *, seed: int = 0, **options: Any
) -> tuple[Path, list[Any]]:
    """Write a stream with an index.json that does not depend on the seed, byte for byte.

    Its length file is of version 1, as earlier releases wrote it, and has no hashes of shards.
    """
    with patch("streampack.index.lengths.length_file_pieces", _without_hashes):
        return builders.write_stream_files(folder, lengths, seed=seed, **options)


def _without_hashes(*arguments: Any) -> Any:
    return length_file_pieces(*arguments[:5])
