"""A check of a format of token files: what is read, parts, growth, resume, and damage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streampack.config import Order, Packing
from streampack.errors import StreampackError
from streampack.flat.token_file import TokenFormat
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream, open_stream
from streampack.streams.sources.token_files import TokenFiles
from streampack.streams.token_stream import TokenStream
from streampack.testing.runs import assert_resumes
from streampack.types import IntArray

Write = Callable[[Path, Sequence[IntArray], str], object]
NUM_DOCUMENTS, NUM_FIRST = 300, 180


def assert_format(form: TokenFormat | str, write: Write, **options: Any) -> None:
    """Check a format of token files, with files that your own writer makes.

    Args:
        form: The format, or its name.
        write: Writes documents, arrays of uint16, into a folder as one file, or one group of files.
            It is called as ``write(folder, documents, name)``; the files' names begin with `name`.
        options: Further options of `TokenFiles`, such as ``dtype="uint16"``.

    Raises:
        AssertionError: If documents differ from those that were written, in whole or in a part; if
            files that are added change the shards before them; if a run cannot be resumed; or if a
            token file that was cut short is read.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, NUM_DOCUMENTS)
    documents = [rng.integers(1, 1000, n).astype(np.uint16) for n in lengths]
    with tempfile.TemporaryDirectory(prefix="streampack-") as name:
        folder = Path(name)

        def stream(**more: Any) -> Stream:
            return Stream(TokenFiles(folder, format=form, **options, **more))

        write(folder, documents[:NUM_FIRST], "a")
        before = open_stream(stream(), 0)
        write(folder, documents[NUM_FIRST:], "b")
        _compare(open_stream(stream(), 0), documents, "all documents")
        part = slice(NUM_FIRST // 2, NUM_FIRST + 9)
        _compare(open_stream(stream(only=part), 0), documents[part], f"only={part}")
        former = open_stream(stream(only=slice(0, NUM_FIRST)), 0)
        if former.growing_digest != before.growing_digest:
            raise AssertionError("the shards of the first file changed when a second was added")

        def make_loader() -> PackedDataLoader:
            dataset = PackedStreamingDataset(
                [stream()], packing=Packing(max_seq_len=256), order=Order(seed=1), batch_size=4
            )
            return PackedDataLoader(dataset)

        assert_resumes(make_loader, every=9)
        _check_cut(folder, stream)


def _compare(stream: TokenStream, documents: Sequence[IntArray], what: str) -> None:
    shards = range(stream.num_shards)
    lengths = [n for shard in shards for n in stream.shard_lengths(shard).tolist()]
    if lengths != list(map(len, documents)):
        raise AssertionError(
            f"{what}: has lengths {lengths[:5]}... of {len(lengths)}, but "
            f"{list(map(len, documents))[:5]}... of {len(documents)} were written"
        )
    read = (
        opened.tokens.read(opened.data, sample)
        for opened in map(stream.open_shard, shards)
        for sample in range(len(opened.tokens.counts))
    )
    for number, (got, expected) in enumerate(zip(read, documents, strict=True)):
        if not np.array_equal(got, expected):
            raise AssertionError(
                f"{what}: document {number} has tokens {got[:5]}, not {expected[:5]}"
            )


def _check_cut(folder: Path, stream: Callable[[], Stream]) -> None:
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    try:
        opened = open_stream(stream(), 0)
        for shard in range(opened.num_shards):
            opened.open_shard(shard)
    except StreampackError:
        return
    raise AssertionError(f"{largest.name} was cut to half of its bytes, and no error was raised")
