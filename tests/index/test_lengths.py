"""Length files for existing streams: `streampack index`."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from streampack.errors import DataError
from streampack.index import write_lengths
from streampack.mds.index import parse_index
from streampack.mds.length_file import (
    LENGTH_FILE,
    length_file_pieces,
    open_length_file,
    write_length_file,
)
from streampack.streams import Stream, open_stream
from tests.helpers import builders
from tests.helpers.caches import decompressed, read_all
from tests.helpers.verbs import call_verb

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
    assert opened.total_tokens() == sum(LENGTHS)


def test_shards_are_read_where_they_lie_as_far_as_they_are_decompressed(tmp_path):
    path, _ = builders.write_stream_files(
        tmp_path / "s", LENGTHS, compression="zstd", lengths_file=False
    )
    shard = parse_index((path / "index.json").read_bytes(), "x").shards[1]
    packed = path / shard.stored.basename
    (path / shard.raw.basename).write_bytes(decompressed(packed, shard))
    packed.unlink()
    before = {file.name for file in path.iterdir()}
    (indexed,) = write_lengths(path)
    assert {file.name for file in path.iterdir()} == before | {"lengths.bin"}
    assert indexed.num_tokens == sum(LENGTHS)


def raw_shards(path) -> list[bytes]:
    index = parse_index((path / "index.json").read_bytes(), "x")
    return [
        (path / shard.raw.basename).read_bytes()
        if shard.packed is None
        else decompressed(path / shard.packed.basename, shard)
        for shard in index.shards
    ]


def flip(file, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("compression", [None, "zstd", "br", "snappy"])
def test_indexing_writes_hashes_that_index_json_lacks(tmp_path, compression):
    path, _ = builders.write_stream_files(tmp_path / "s", LENGTHS, compression=compression)
    before = (path / "index.json").read_bytes()
    index = parse_index(before, "x")
    file = open_length_file(path / LENGTH_FILE, before, index)
    assert list(file.hashes) == [xxhash.xxh64_hexdigest(raw) for raw in raw_shards(path)]
    assert (path / "index.json").read_bytes() == before
    opened = open_stream(Stream(local=str(path)), 0)
    assert [shard.raw.hashes["xxh64"] for shard in opened.shards.index.shards] == list(file.hashes)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_stream_with_hashes_gets_a_length_file_that_every_release_reads(tmp_path, compression):
    path, _ = builders.write_stream_files(
        tmp_path / "s", LENGTHS, compression=compression, hashes=["sha1"]
    )
    content = (path / LENGTH_FILE).read_bytes()
    text = (path / "index.json").read_bytes()
    index = parse_index(text, "x")
    file = open_length_file(path / LENGTH_FILE, text, index)
    assert (content[8], file.hashes) == (1, ())
    # The size that releases without hashes expected.
    assert len(content) == file.head_bytes + 16 * len(index.shards) + 12 * file.num_samples


def test_a_length_file_of_an_earlier_release_is_read_and_the_stream_is_warned_of(tmp_path, caplog):
    path, samples = builders.write_stream_files(tmp_path / "s", LENGTHS)
    text = (path / "index.json").read_bytes()
    index = parse_index(text, "x")
    file = open_length_file(path / LENGTH_FILE, text, index)
    shards = [file.shard_edges(shard) for shard in range(len(index.shards))]
    edges = np.concatenate(shards).astype(np.uint32)
    pieces = length_file_pieces(text, index, "tokens", np.array(LENGTHS, "u4"), edges)
    write_length_file(path / LENGTH_FILE, pieces)
    stream = Stream(remote=str(path), local=str(tmp_path / "cache"))
    assert read_all(open_stream(stream, 0)) == [tokens.tolist() for tokens in samples]
    assert open_stream(stream, 0).shards.has_lengths
    assert "let `streampack index` write hashes" in caplog.text
    caplog.clear()
    write_lengths(path)  # the way out
    read_all(open_stream(Stream(remote=str(path), local=str(tmp_path / "again")), 0))
    assert "hashes" not in caplog.text


def test_an_index_of_another_column_has_the_hashes_all_the_same(tmp_path):
    values = {"other": [np.ones(2, np.int32)] * len(LENGTHS)}
    path, _ = builders.write_stream_files(
        tmp_path / "s", LENGTHS, columns={"other": "ndarray:int32"}, values=values
    )
    write_lengths(path, tokens="other")
    flip(next(path.glob("shard.00002*")), 0.5)
    assert not open_stream(Stream(local=str(path)), 0).shards.has_lengths
    with pytest.raises(DataError, match=r"its xxh64 is \w+, but lengths\.bin says"):
        read_all(open_stream(Stream(local=str(path)), 0))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_damaged_shard_of_a_stream_with_hashes_is_not_indexed(tmp_path, compression):
    path, _ = builders.write_stream_files(
        tmp_path / "s", LENGTHS, hashes=["md5"], compression=compression, lengths_file=False
    )
    flip(next(path.glob("shard.00002*")), 0.9)
    with pytest.raises(DataError, match=r"shard\.00002\S*: its md5 is \w+, but index.json says"):
        write_lengths(path)
    assert not (path / LENGTH_FILE).exists()


def test_subfolders_are_indexed_in_order(tmp_path):
    for name in ("b", "a", "a/val"):
        builders.write_stream_files(tmp_path / "w" / name, [3, 4], lengths_file=False)
    paths = [indexed.path for indexed in write_lengths(tmp_path / "w")]
    assert paths == [tmp_path / "w" / name / "lengths.bin" for name in ("a", "a/val", "b")]


def wide_stream(folder) -> None:
    """Write a stream of int64 ids, which are recognisable as such."""
    builders.write_stream_files(
        folder, [40] * 100, encoding="bytes", dtype="int64", lengths_file=False
    )


def test_a_type_that_the_values_contradict_is_refused_and_nothing_is_written(tmp_path):
    wide_stream(tmp_path / "s")

    with pytest.raises(DataError, match=r"likely written as int64: .*tokens='tokens:int64', or"):
        write_lengths(tmp_path / "s", tokens="tokens:int32")

    assert not (tmp_path / "s" / LENGTH_FILE).exists()
    assert write_lengths(tmp_path / "s", tokens="tokens:int64")[0].num_tokens == 4000
    indexed = write_lengths(tmp_path / "s", check_dtypes=False, tokens="tokens:int32")
    assert indexed[0].num_tokens == 8000


def test_a_reader_names_the_length_file_that_was_made_with_a_wrong_type(tmp_path):
    wide_stream(tmp_path / "s")
    write_lengths(tmp_path / "s", check_dtypes=False, tokens="tokens:int32")
    file = tmp_path / "s" / LENGTH_FILE

    wrong = Stream(local=str(tmp_path / "s"), tokens="tokens:int32")
    with pytest.raises(DataError, match=rf"tokens='tokens:int64'.*{file} was made with int32 too"):
        open_stream(wrong, 0).open_shard(0)
    right = Stream(local=str(tmp_path / "s"), tokens="tokens:int64")
    message = rf"40 tokens, but {file} says 80; rewrite it: .* --tokens tokens:int64$"
    with pytest.raises(DataError, match=message):
        open_stream(right, 0).open_shard(0)
    call_verb("index", tmp_path / "s", "--tokens", "tokens:int64")
    assert open_stream(right, 0).open_shard(0).tokens.counts.tolist()[:2] == [40, 40]


@pytest.mark.parametrize("value", [-100, 2**32 - 1])
def test_a_column_of_what_is_no_token_id_is_no_token_column(tmp_path, value):
    values = {"labels": [np.full(n, value) for n in LENGTHS]}
    path, _ = builders.write_stream_files(
        tmp_path / "s", LENGTHS, columns={"labels": "ndarray:int64"}, values=values
    )
    with pytest.raises(DataError, match=f"shard 0: token id {value}, but ids must be 0 to"):
        write_lengths(path, tokens="labels")
