"""`streampack index --out`: documents, edges and hashes of token files, and documents of rows."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    Download,
    Mixing,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    TokenFiles,
)
from streampack.errors import ConfigError, DataError, StreampackError
from streampack.flat import token_file
from streampack.index import token_index
from streampack.streams import open_stream
from streampack.testing import assert_resumes, assert_same_in_every_world
from streampack.write import write_stream
from tests.helpers.faults import servers
from tests.helpers.flat import damage, make_documents, read_documents, source_of, write
from tests.helpers.verbs import call_verb

FLAT = ("megatron", "olmo", "datatrove", "arrow")
EOS = 7
PACKING = Packing(max_seq_len=256, eos_id=EOS)


@pytest.fixture(autouse=True)
def small_cells(monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", 4096)


def index(source: object, out: Path, *options: object) -> str:
    return call_verb("index", source, "--out", out, *options)


def batches_of(stream: Stream, packing: Packing = PACKING) -> list[np.ndarray[Any, Any]]:
    dataset = PackedStreamingDataset([stream], packing=packing, batch_size=2)
    return [batch["tokens"].numpy().copy() for batch in PackedDataLoader(dataset)]


def lengths_of(stream: Stream) -> list[int]:
    opened = open_stream(stream, 0)
    return [n for shard in range(opened.num_shards) for n in opened.shard_lengths(shard).tolist()]


def mixed_documents() -> list[np.ndarray[Any, Any]]:
    """Documents, only some of which end in the EOS."""
    documents = make_documents()
    return [
        np.append(each, EOS).astype("uint16") if number % 3 else each
        for number, each in enumerate(documents)
    ]


@pytest.mark.parametrize("form", FLAT)
def test_an_index_has_the_edges_of_documents(form, tmp_path):
    documents = mixed_documents()
    write(form, tmp_path / "data", documents)
    write_stream(documents, tmp_path / "mds", size_limit=4096)
    types = ["--dtype", "uint16"] if form == "olmo" else []
    shown = index(tmp_path / "data", tmp_path / "index", *types)
    assert "300 documents" in shown
    indexed = Stream(TokenFiles(tmp_path / "data", index=tmp_path / "index"))
    got = np.concatenate([batch[batch > 0] for batch in batches_of(indexed)])
    expected = np.concatenate(
        [batch[batch > 0] for batch in batches_of(Stream(local=tmp_path / "mds"))]
    )
    assert len(got) == len(expected)
    assert (got == EOS).sum() == (expected == EOS).sum()
    plain = open_stream(Stream(source_of(form, tmp_path / "data")), 0)
    assert open_stream(indexed, 0).full_digest == plain.full_digest  # so a run can resume with it


@pytest.mark.parametrize("form", FLAT)
def test_a_byte_that_changed_since_is_an_error(form, tmp_path):
    write(form, tmp_path / "data", make_documents())
    types = ["--dtype", "uint16"] if form == "olmo" else []
    index(tmp_path / "data", tmp_path / "index", *types)
    stream = open_stream(Stream(TokenFiles(tmp_path / "data", index=tmp_path / "index")), 0)
    place = int(stream.shards.virtual.extents[2, 0]) + 11
    path = tmp_path / "data" / stream.shards.files[0].name
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    stream.open_shard(1)
    with pytest.raises(DataError, match=rf"{path.name}.*not those that were indexed"):
        stream.open_shard(2)


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with servers.s3_server(tmp_path / "root") as s3, servers.s3_environment(s3.url):
        yield tmp_path / "root" / "bucket"


@pytest.mark.processes
def test_a_remote_is_verified_with_its_index_and_warned_about_without(tmp_path, bucket, caplog):
    write("megatron", bucket / "tokens", make_documents())
    options: dict[str, Any] = {"local": tmp_path / "cache", "format": "megatron"}
    options |= {"files": "s3://bucket/tokens", "download": Download(retry=0, timeout=60)}
    with caplog.at_level(logging.WARNING):
        open_stream(Stream(TokenFiles(**options)), 0)
    assert "has no hashes" in caplog.text
    caplog.clear()
    listed = [f"s3://bucket/tokens/{name}.bin" for name in ("gone", "web")]
    with pytest.raises(DataError, match=r"gone\.bin: does not exist; correct its name"):
        list(token_index.index_files(listed, tmp_path / "none"))
    index("s3://bucket/tokens", tmp_path / "index", "--format", "megatron")
    whole = bucket / "tokens" / "web.bin"
    content = whole.read_bytes()
    with caplog.at_level(logging.WARNING):
        stream = open_stream(Stream(TokenFiles(**options, index=tmp_path / "index")), 0)
        stream.open_shard(0)
    assert "has no hashes" not in caplog.text
    damaged = bytearray(content)
    damaged[int(stream.shards.virtual.extents[1, 0]) + 3] ^= 1
    whole.write_bytes(damaged)
    reopened = open_stream(Stream(TokenFiles(**options, index=tmp_path / "index")), 0)
    with pytest.raises(DataError, match=r"web\.bin"):
        reopened.open_shard(1)


@pytest.mark.parametrize("num_damages", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_damaged_index_is_a_typed_error_or_stays_inside_the_file(num_damages, tmp_path):
    write("datatrove", tmp_path / "data", make_documents(30))
    index(tmp_path / "data", tmp_path / "index")
    [path] = (tmp_path / "index").iterdir()
    whole, rng = path.read_bytes(), np.random.default_rng(3)
    num_refused = 0
    for _ in range(num_damages):
        path.write_bytes(damage(whole, rng))
        try:
            stream = open_stream(Stream(TokenFiles(tmp_path / "data", index=tmp_path / "index")), 0)
            for shard in range(stream.num_shards):
                opened = stream.open_shard(shard)
                ends = opened.tokens.begins + opened.tokens.counts * 2
                assert ((opened.tokens.begins >= 0) & (ends <= len(opened.data))).all()
                stream.shard_edges(shard, 1, 2)
        except StreampackError:
            num_refused += 1
    assert num_refused > num_damages // 10


def test_an_index_of_other_tokens_or_of_none_is_refused(tmp_path):
    write("datatrove", tmp_path / "data", make_documents(30))
    stream = Stream(TokenFiles(tmp_path / "data", index=tmp_path / "index"))
    with pytest.raises(DataError, match=r"does not exist.*streampack index FILES --out"):
        open_stream(stream, 0)
    index(tmp_path / "data", tmp_path / "index")
    write("datatrove", tmp_path / "data", make_documents(31))
    with pytest.raises(DataError, match=r"was made for \d+ bytes of tokens, but web.ds has"):
        open_stream(stream, 0)
    with pytest.raises(ConfigError, match="index does not work with unit"):
        Stream(TokenFiles(tmp_path, index=tmp_path, unit="sequence"))


# Rows of joined documents.


def joined_rows(length: int = 64) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Return rows of joined documents as in LLM-Foundry, and the documents as the rows cut them."""
    documents = [np.append(each % 900 + 10, EOS) for each in make_documents(200)]
    tokens = np.concatenate(documents)
    rows = [tokens[n : n + length].astype("int32") for n in range(0, len(tokens) - length, length)]
    pieces = []
    for row in rows:
        ends = np.flatnonzero(row == EOS) + 1
        pieces += [part for part in np.split(row, ends) if len(part)]
    return rows, pieces


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_are_split_into_documents_that_are_planned_and_resumed(compression, tmp_path):
    rows, pieces = joined_rows()
    write_stream(rows, tmp_path / "rows", size_limit=4096, compression=compression)
    (tmp_path / "rows" / "lengths.bin").unlink()
    stream = Stream(local=tmp_path / "rows", split_at=EOS, index=tmp_path / "index")
    with pytest.raises(DataError) as refused:
        open_stream(stream, 0)
    [command] = re.findall(r"streampack (index .*)$", str(refused.value))
    call_verb(*command.split())
    opened = open_stream(stream, 0)
    assert opened.num_shards > 4
    assert lengths_of(stream) == list(map(len, pieces))
    read = [
        shard.tokens.read(shard.data, sample)
        for shard in map(opened.open_shard, range(opened.num_shards))
        for sample in range(len(shard.tokens.counts))
    ]
    for one, other in zip(read, pieces, strict=True):
        np.testing.assert_array_equal(one, other)

    def make(world: Any = None) -> PackedStreamingDataset:
        return PackedStreamingDataset(
            [stream],
            packing=Packing(max_seq_len=128),
            mixing=Mixing(global_batch_size=8),
            batch_size=2,
            world=world,
        )

    assert assert_resumes(lambda: PackedDataLoader(make()), every=9) > 3
    assert_same_in_every_world(make)


def test_documents_of_rows_differ_from_the_rows_in_a_saved_run(tmp_path):
    rows, _ = joined_rows()
    write_stream(rows, tmp_path / "rows")
    index(tmp_path / "rows", tmp_path / "index", "--eos-id", EOS)
    index(tmp_path / "rows", tmp_path / "index", "--eos-id", 500)
    digests = {
        open_stream(Stream(local=tmp_path / "rows", only=shards, **options), 0).full_digest
        for shards in (None, slice(0, 1))
        for options in (
            {},
            {"split_at": EOS, "index": tmp_path / "index"},
            {"split_at": 500, "index": tmp_path / "index"},
        )
    }
    assert len(digests) == 6


def test_rows_that_are_not_those_of_the_index_are_refused(tmp_path):
    rows, _ = joined_rows()
    write_stream(rows, tmp_path / "rows")
    index(tmp_path / "rows", tmp_path / "index", "--eos-id", EOS)
    write_stream(rows[::-1][:-1], tmp_path / "other")
    stream = Stream(local=tmp_path / "other", split_at=EOS, index=tmp_path / "index")
    with pytest.raises(DataError, match=r"documents-7\.bin: is stale or damaged"):
        open_stream(stream, 0)


@pytest.mark.parametrize("piece_bytes", [250, 1 << 20])
@pytest.mark.parametrize("form", FLAT)
def test_rows_of_token_files_are_split_inside_rows(form, piece_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "PIECE_BYTES", piece_bytes)
    rows, pieces = joined_rows()
    rows = [row.astype("uint16") for row in rows]
    write(form, tmp_path / "data", [*rows, rows[0][:0]])  # the last one is empty
    options = ["--dtype", "uint16"] if form == "olmo" else []
    shown = index(tmp_path / "data", tmp_path / "index", "--eos-id", EOS, *options)
    assert f"{len(pieces):,} documents" in shown
    assert f"tokens; {5 if form == 'olmo' else 0} outside of them" in shown
    stream = Stream(TokenFiles(tmp_path / "data", split_at=EOS, index=tmp_path / "index"))
    found = read_documents(stream)
    assert [each.tolist() for each in found] == [each.tolist() for each in pieces]
    with pytest.raises(DataError, match="was made for eos_id=7, but split_at=8"):
        open_stream(Stream(TokenFiles(tmp_path / "data", split_at=8, index=tmp_path / "index")), 0)


def test_rows_that_an_index_leaves_out_are_in_no_document(tmp_path):
    rows, _ = joined_rows()
    write("megatron", tmp_path, [row.astype("uint16") for row in rows])
    table = tmp_path / "web.idx"
    content, num = bytearray(table.read_bytes()), len(rows)
    content[34 : 34 + 4 * num] = np.full(num, 9, "<i4").tobytes()  # the first 9 tokens of each
    table.write_bytes(content)
    index(tmp_path, tmp_path / "out", "--eos-id", EOS, "--trailing", "ignore")
    options = {"split_at": EOS, "index": tmp_path / "out", "trailing": "ignore"}
    found = read_documents(Stream(TokenFiles(tmp_path, **options)))
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate([row[:9] for row in rows]))
    assert all((each[:-1] != EOS).all() for each in found)


def test_an_index_of_another_version_is_made_again(tmp_path):
    rows, _ = joined_rows()
    write("megatron", tmp_path, [row.astype("uint16") for row in rows])
    index(tmp_path, tmp_path / "out", "--eos-id", EOS)
    [path] = (tmp_path / "out").iterdir()
    content = bytearray(path.read_bytes())
    content[8:16] = (1).to_bytes(8, "little")
    path.write_bytes(content)
    stream = Stream(TokenFiles(tmp_path, split_at=EOS, index=tmp_path / "out"))
    with pytest.raises(DataError, match="is not an index of tokens") as refused:
        open_stream(stream, 0)
    [command] = re.findall(r"streampack (index .*)$", str(refused.value))
    call_verb(*command.replace("FILES", str(tmp_path)).split())
    assert open_stream(stream, 0).num_samples


def test_documents_as_long_as_a_pack_are_no_joined_rows_if_rows_are_split(tmp_path, caplog):
    rows = [np.full(64, n % 900 + 10, "uint16") for n in range(300)]
    rows[-1][-1] = EOS
    write("megatron", tmp_path, rows)
    index(tmp_path, tmp_path / "out", "--eos-id", EOS)
    for option, is_warned in (({"split_at": EOS}, False), ({}, True)):
        caplog.clear()
        stream = Stream(TokenFiles(tmp_path, index=tmp_path / "out", **option), name=str(is_warned))
        batches_of(stream, Packing(max_seq_len=64))
        assert ("rows of joined" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        (b"", [], "has no web.npy.csv.gz|has no web.csv.gz|the type of its tokens is in no file"),
        (b"", ["--eos-id", EOS], "set dtype|set --dtype"),
        (b"", ["--eos-id", EOS, "--dtype", "uint16"], "likely written as int32"),
        (
            b"",
            ["--eos-id", 70000, "--dtype", "uint16", "--no-check-dtypes"],
            "eos_id=70000 does not fit",
        ),
        (b"", ["--eos-id", 999, "--dtype", "uint32"], "is the EOS 999"),
        (b"\x93NUMPY\1\0", ["--eos-id", EOS, "--dtype", "uint32"], "a numpy header"),
    ],
)
def test_raw_tokens_are_indexed_by_their_type_and_eos(start, options, message, tmp_path):
    tokens = np.concatenate([np.append(each % 900 + 10, EOS) for each in make_documents(200)])
    (tmp_path / "web.npy").write_bytes(start + tokens.astype("<u4").tobytes())
    with pytest.raises(StreampackError, match=message) as refused:
        index(tmp_path, tmp_path / "out", *options)
    assert "dtype=''" not in str(refused.value)


def test_the_type_of_raw_tokens_is_checked_up_to_the_end_of_a_short_file(tmp_path):
    (tmp_path / "web.npy").write_bytes(np.arange(100, 228).astype("<u4").tobytes())
    with pytest.raises(DataError, match="likely written as int32"):
        index(tmp_path, tmp_path / "out", "--eos-id", EOS, "--dtype", "uint16")


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_llm_cs_header_is_refused_and_its_tokens_are_read_without_it(magic, dtype, tmp_path):
    documents = [np.append(each % 900 + 10, EOS).astype(dtype) for each in make_documents(50)]
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, sum(map(len, documents))
    path = tmp_path / "web.bin"
    path.write_bytes(head.tobytes() + np.concatenate(documents).tobytes())
    options = ["--eos-id", EOS, "--dtype", dtype]
    with pytest.raises(DataError, match=r"llm\.c's header of 1024 bytes.*tail -c") as refused:
        index(path, tmp_path / "out", *options)
    command = str(refused.value).partition("without it: ")[2].replace("COPY", "copy")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    index(tmp_path / "copy.bin", tmp_path / "out", *options)
    found = read_documents(Stream(TokenFiles(tmp_path / "copy.bin", index=tmp_path / "out")))
    assert [each.tolist() for each in found] == [each.tolist() for each in documents]


def test_an_index_is_not_written_to_a_store(tmp_path):
    write("megatron", tmp_path, make_documents(9))
    write_stream(make_documents(9), tmp_path / "mds")
    for source, options in ((tmp_path / "web", ()), (tmp_path / "mds", ("--eos-id", EOS))):
        with pytest.raises(ConfigError, match=r"out='s3://bucket/out' is a URL"):
            index(source, "s3://bucket/out", *options)


def write_many(folder: Path, count: int) -> list[int]:
    """Write files of different documents; return how many documents each has."""
    for number in range(count):
        documents = make_documents(20 + number, seed=number)
        write(
            "datatrove",
            folder,
            [np.append(each, EOS).astype("u2") for each in documents],
            f"{number}",
        )
    return [20 + number for number in range(count)]


@pytest.mark.processes
def test_files_are_indexed_in_parts_in_processes_and_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", 64 << 20)  # as in the processes
    counts = write_many(tmp_path / "data", 5)
    index(tmp_path / "data", tmp_path / "whole")
    out = tmp_path / "out"
    shown = [index(tmp_path / "data", out, "--part", f"{n}/2", "--num-workers", 2) for n in (1, 2)]
    assert [each.count("documents") for each in shown] == [3, 2]
    for number in range(5):
        name = f"{number}.ds.documents"
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    kept, lost = out / "0.ds.documents", out / "3.ds.documents"
    before = kept.stat().st_mtime_ns
    lost.unlink()
    (out / "1.ds.documents").write_bytes(b"")
    changed = [np.append(each, EOS).astype("u2") for each in make_documents(30, seed=9)]
    write("datatrove", tmp_path / "data", changed, "2")
    again = index(tmp_path / "data", out, "--resume")
    assert [f"{n}.ds: {count} documents" in again for n, count in enumerate(counts)] == [
        *(True, True, False, True, True)
    ]
    assert "2.ds: 30 documents" in again
    assert kept.stat().st_mtime_ns == before
    index(tmp_path / "data", out, "--resume", "--eos-id", EOS)  # made for another EOS
    assert kept.stat().st_mtime_ns != before
    assert open_stream(
        Stream(TokenFiles(tmp_path / "data", index=out, split_at=EOS)), 0
    ).num_samples


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b"])
def test_a_part_is_one_of_n(part, tmp_path):
    write_many(tmp_path, 2)
    with pytest.raises(ConfigError, match="not K/N with K from 1 to N"):
        index(tmp_path, tmp_path / "out", "--part", part)


def test_options_for_token_files_are_refused_for_shards(tmp_path):
    write_stream(make_documents(9), tmp_path)
    for option in (("--part", "1/2"), ("--resume",), ("--num-workers", 2)):
        with pytest.raises(ConfigError, match="is for token files"):
            call_verb("index", tmp_path, *option)
