"""Length files for existing streams: `streampack index`."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.streams import Stream, open_stream
from streampack.write import write_lengths
from tests import builders

LENGTHS = [1 + (i * 37) % 300 for i in range(40)]


@pytest.mark.parametrize("compression", [None, "zstd", "br"])
@pytest.mark.parametrize("extra_columns", [False, True])
def test_indexing_gives_the_file_and_leaves_nothing_else(tmp_path, compression, extra_columns):
    path, _ = builders.write_stream_files(
        tmp_path / "s",
        LENGTHS,
        compression=compression,
        extra_columns=extra_columns,
        lengths_file=False,
    )
    before = {file.name for file in path.iterdir()}
    shards = []
    (indexed,) = write_lengths(path, progress=shards.append)
    assert {file.name for file in path.iterdir()} - before == {"lengths.bin"}
    assert (indexed.column, indexed.num_samples) == ("tokens", 40)
    assert indexed.num_tokens == sum(LENGTHS)
    assert len(shards) == indexed.num_shards
    opened = open_stream(Stream(local=str(path)), 0)
    assert opened.total_tokens() == (sum(LENGTHS), "lengths")


def test_subfolders_are_indexed_in_order(tmp_path):
    for name in ("b", "a", "a/val"):
        builders.write_stream_files(tmp_path / "w" / name, [3, 4], lengths_file=False)
    paths = [indexed.path for indexed in write_lengths(tmp_path / "w")]
    assert paths == [tmp_path / "w" / name / "lengths.bin" for name in ("a", "a/val", "b")]


def test_a_stream_of_empty_samples_is_indexed_and_then_refused_by_the_reader(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "s", [2, 0, 1], encoding="bytes")
    with pytest.raises(DataError, match="stream 's', sample 1: 0 tokens"):
        open_stream(Stream(local=str(path), tokens_dtype="int32"), 0)


def test_what_is_no_stream_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no index\.json, nor does a subfolder"):
        write_lengths(tmp_path)
    path, _ = builders.write_stream_files(tmp_path / "s", LENGTHS, lengths_file=False)
    with pytest.raises(DataError, match="no column 'ids'; it holds 'tokens'; set --column="):
        write_lengths(path, column="ids")
    shard = path / "shard.00000.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[:50])
    with pytest.raises(DataError, match=f"has 50 bytes, but index.json says {len(content)}"):
        write_lengths(path)
    shard.unlink()
    with pytest.raises(DataError, match=r"shard\.00000\.mds: there is no such file"):
        write_lengths(path)
    assert not (path / "lengths.bin").exists()


@pytest.mark.parametrize("value", [-100, 2**32 - 1])
def test_a_column_of_what_is_no_token_id_is_no_token_column(tmp_path, value):
    values = {"labels": [np.full(n, value) for n in LENGTHS]}
    path, _ = builders.write_stream_files(
        tmp_path / "s", LENGTHS, columns={"labels": "ndarray:int64"}, values=values
    )
    with pytest.raises(DataError, match=f"shard 0: token id {value}, but ids must be 0 to"):
        write_lengths(path, column="labels")
