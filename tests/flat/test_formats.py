"""Token files of other programs give the packs that MDS shards of the same documents give."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import (
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    TokenFiles,
    World,
)
from streampack.errors import ConfigError, DataError
from streampack.flat import token_file
from streampack.index import token_index
from streampack.streams import open_stream
from streampack.write import write_stream
from tests.helpers.faults import servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.flat import (
    FORMATS,
    Documents,
    make_documents,
    options_of,
    source_of,
    write,
    write_arrow,
    write_datatrove,
    write_litdata,
    write_megatron,
)
from tests.helpers.verbs import call_verb

FLAT = tuple(form for form in FORMATS if form != "litdata")
CELL_BYTES = 4096


def make_dataset(*streams: Stream, num_lanes: int = 1, **options: Any) -> PackedStreamingDataset:
    packing = options.pop("packing", Packing(max_seq_len=256))
    return PackedStreamingDataset(
        streams,
        packing=packing,
        order=Order(seed=5, num_lanes=num_lanes),
        batch_size=2,
        world=options.pop("world", World()),
        **options,
    )


def batches_of(dataset: PackedStreamingDataset) -> list[np.ndarray[Any, Any]]:
    return [batch["tokens"].numpy().copy() for batch in PackedDataLoader(dataset)]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected) > 5
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def small_cells(monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", CELL_BYTES)


NUM_RUNS, RUN_DOCUMENTS, RUN_TOKENS = 24, 16, CELL_BYTES // 2


@pytest.fixture
def runs():
    """Runs that each fill a cell, with as many documents as each other.

    Each document has fewer than 256 tokens, so that MDS states its shape in one byte.
    """
    rng = np.random.default_rng(2)
    mean = RUN_TOKENS // RUN_DOCUMENTS
    borders = np.arange(mean, RUN_TOKENS, mean)
    return [
        np.split(
            rng.integers(1, 1000, RUN_TOKENS).astype("uint16"),
            borders + rng.integers(-mean // 2 + 1, mean // 2, len(borders)),
        )
        for _ in range(NUM_RUNS)
    ]


def write_runs(form: str, folder: Path, runs: list[Documents]) -> None:
    """Write runs so that each is a shard, or a virtual one."""
    documents = [document for run in runs for document in run]
    if form == "mds":
        one = write_stream(runs[0], folder.with_name("one"))
        size = int(open_stream(Stream(local=one.path), 0).raw_bytes[0])
        write_stream(documents, folder, size_limit=size)
    elif form == "litdata":
        folder.mkdir()
        write_litdata(folder, documents, chunk_bytes=None, chunk_size=RUN_DOCUMENTS)
    elif form == "arrow":
        for number, run in enumerate(runs):
            write(form, folder, run, f"{number:02}")
    else:
        write(form, folder, documents)


def test_the_same_runs_of_documents_give_the_same_packs_in_every_format(
    runs, tmp_path, monkeypatch
):
    found = {}
    for form in ("mds", *FORMATS):
        # In a file of Arrow, other bytes precede the tokens of a run.
        monkeypatch.setattr(token_file, "CELL_BYTES", CELL_BYTES * (2 if form == "arrow" else 1))
        write_runs(form, tmp_path / form, runs)
        stream = Stream(source_of(form, tmp_path / form))
        sizes = open_stream(stream, 0).raw_bytes
        assert len(sizes) == NUM_RUNS
        assert len(set(sizes.tolist())) == 1
        found[form] = [batches_of(make_dataset(stream, num_lanes=n)) for n in (1, 2, 4)]
    for form in FORMATS:
        for got, expected in zip(found[form], found["mds"], strict=True):
            assert_same(got, expected)


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("form", FLAT)
def test_a_run_resumes_in_another_world(form, tmp_path):
    write(form, tmp_path / form, make_documents())
    stream = Stream(source_of(form, tmp_path / form))
    mixing = Mixing(global_batch_size=4)
    alone = [row for batch in batches_of(make_dataset(stream, mixing=mixing)) for row in batch]
    loader = PackedDataLoader(make_dataset(stream, mixing=mixing))
    for _ in itertools.islice(loader, 6):
        state = loader.state_dict()
    ranks = []
    for rank in range(2):
        world = World(rank=rank, num_ranks=2)
        dataset = make_dataset(stream, mixing=mixing, world=world)
        dataset.load_state_dict(state)
        ranks.append(PackedDataLoader(dataset, check_ranks=False))
    rows = [row for pair in zip(*ranks, strict=True) for batch in pair for row in batch["tokens"]]
    assert_same([row.numpy() for row in rows], alone[12:])


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    with (
        servers.s3_server(tmp_path / "root") as s3,
        FaultServer(upstream=s3.url) as server,
        servers.s3_environment(server.url),
    ):
        yield tmp_path / "root" / "bucket", server


@pytest.mark.processes
@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize(
    ("form", "names"),
    [("megatron", ""), ("olmo", "*.npy"), ("datatrove", "a.ds b.ds"), ("arrow", "a.arrow b.arrow")],
)
def test_a_remote_is_fetched_once_and_gives_the_packs_of_the_local_files(
    form, names, tmp_path, bucket
):
    folder, server = bucket
    for name, seed in (("a", 1), ("b", 2)):
        write(form, folder / "tokens", make_documents(seed=seed), name)
    expected = batches_of(make_dataset(Stream(source_of(form, folder / "tokens")), num_lanes=2))
    urls = [f"s3://bucket/tokens/{name}" for name in names.split(" ")]
    files = urls if len(urls) > 1 else urls[0]
    options: dict[str, Any] = {"local": tmp_path / "cache", "format": form}
    remote = Stream(source_of(form, files, **options))
    held = data = sum(each.nbytes for seed in (1, 2) for each in make_documents(seed=seed))
    if form == "arrow":
        with pytest.raises(ConfigError, match="fetched whole") as refused:
            open_stream(remote, 0)
        command = refused.value.args[0].split("`")[1].replace("FOLDER", str(tmp_path / "index"))
        call_verb(*command.split()[1:])
        assert not list(tmp_path.glob("cache/**/*.arrow*"))
        whole = server.requests(r"\.arrow$", "GET")
        data = sum(path.stat().st_size for path in folder.rglob("*.arrow"))
        assert sum(request.num_bytes for request in whole) == data
        server.start_anew()
        remote = Stream(source_of(form, files, index=tmp_path / "index", **options))
    first = make_dataset(remote, num_lanes=2)
    assert_same(batches_of(first), expected)
    # A second start on this node finds the tokens and tables in the cache.
    second = make_dataset(remote, num_lanes=2)
    assert_same(batches_of(second), expected)
    tokens = server.requests(r"\.(bin|npy|ds|arrow)$", "GET")
    assert held <= sum(request.num_bytes for request in tokens) <= 1.02 * data
    tables = server.requests(r"\.(idx|csv\.gz|index|metadata)$", "GET")
    paths = [request.path for request in tables if not request.path.endswith("metadata")]
    assert len(paths) == len(set(paths)) == (0 if form == "arrow" else 2)
    index_bytes = [
        PackedDataLoader(each).stats()["shards"]["index_bytes"] for each in (first, second)
    ]
    assert index_bytes == [sum(request.num_bytes for request in tables), 0]


@pytest.mark.processes
@pytest.mark.parametrize("form", ["megatron", "olmo", "datatrove"])
def test_a_file_of_a_remote_is_opened_with_the_files_that_describe_it(form, tmp_path, bucket):
    write(form, bucket[0] / "tokens", make_documents(), "web.v1")
    suffix = {"megatron": "bin", "olmo": "npy", "datatrove": "ds"}[form]
    remote = f"s3://bucket/tokens/web.v1.{suffix}"
    stream = Stream(source_of(form, remote, local=tmp_path / "cache", format=form))
    assert open_stream(stream, 0).num_samples == 300


@pytest.mark.processes
def test_an_object_that_changed_is_an_error(tmp_path, bucket, monkeypatch):
    folder, _ = bucket
    write("megatron", folder / "tokens", make_documents())
    stream = Stream(TokenFiles("s3://bucket/tokens", local=tmp_path / "cache", format="megatron"))
    dataset = make_dataset(stream)
    write("megatron", folder / "tokens", [each + 1 for each in make_documents()])
    later = time.time() + 100  # rclone's ETag may only have a resolution of seconds
    os.utime(folder / "tokens" / "web.bin", (later, later))
    # Another attempt might find the former object: attempts last for the whole budget.
    monkeypatch.setattr("streampack.storage.download.budget_s", lambda *_: 2.0)
    with pytest.raises(DataError, match=r"web\.bin"):
        next(iter(PackedDataLoader(dataset)))


def test_a_sample_is_a_document_or_a_sequence(tmp_path):
    documents = make_documents(50)
    write_megatron(tmp_path, documents, sequences=3)
    whole = open_stream(Stream(TokenFiles(tmp_path)), 0)
    pieces = open_stream(Stream(TokenFiles(tmp_path, unit="sequence")), 0)
    assert whole.shard_lengths(0).tolist() == [len(each) for each in documents]
    assert pieces.num_samples == 150
    assert pieces.shard_lengths(0).sum() == whole.shard_lengths(0).sum()


def test_a_source_is_a_folder_a_file_a_prefix_a_glob_or_a_list(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_datatrove(tmp_path / name, make_documents(20), "x")
    sources: list[tuple[Any, int]] = [
        (tmp_path, 40),
        (tmp_path / "a" / "x.ds", 20),
        (tmp_path / "a" / "x", 20),
        (f"{tmp_path}/*/x.ds", 40),
        ([tmp_path / "b" / "x.ds", tmp_path / "a" / "x.ds"], 40),
    ]
    for source, count in sources:
        assert open_stream(Stream(TokenFiles(source)), 0).num_samples == count


@pytest.mark.parametrize("form", ["megatron", "olmo", "datatrove", "arrow"])
def test_a_prefix_is_the_whole_name_before_the_ending(form, tmp_path):
    write(form, tmp_path, make_documents(20), "web-v1")
    write(form, tmp_path, make_documents(30), "web-v1.1")
    assert open_stream(Stream(source_of(form, tmp_path / "web-v1")), 0).num_samples == 20
    assert open_stream(Stream(source_of(form, tmp_path / "web-v1.1")), 0).num_samples == 30
    with pytest.raises(ConfigError, match="none of its 0 files ends in"):
        open_stream(Stream(source_of(form, tmp_path / "web")), 0)


def test_a_saved_dataset_is_read_in_its_own_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [[n, n + 1] for n in range(100)]
    dataset = datasets.Dataset.from_dict({"input_ids": rows})
    both = datasets.DatasetDict({"train": dataset, "test": dataset})
    both.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    with pytest.raises(ConfigError, match="splits of a DatasetDict; name the folder") as refused:
        open_stream(Stream(TokenFiles(tmp_path / "both")), 0)
    folder = refused.value.args[0].rpartition("such as ")[2]
    assert Path(folder).parent == tmp_path / "both"
    stream = open_stream(Stream(TokenFiles(tmp_path / "both" / "train")), 0)
    found = [
        opened.tokens.read(opened.data, row).tolist()
        for opened in map(stream.open_shard, range(stream.num_shards))
        for row in range(len(opened.tokens.counts))
    ]
    assert found == rows


def test_a_cache_of_datasets_gives_the_rows_of_one_split_alone(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6]] * 9})
    rows.save_to_disk(tmp_path / "saved")
    [saved] = (tmp_path / "saved").glob("*.arrow")
    cache = tmp_path / "cache"
    cache.mkdir()
    left = f"cache-{'0' * 16}.arrow"  # what map and filter leave
    shutil.copy(saved, cache / left)
    with pytest.raises(ConfigError, match=rf"has only files that map .*{left}; name the file"):
        open_stream(Stream(TokenFiles(cache)), 0)
    assert open_stream(Stream(TokenFiles(cache / left)), 0).num_samples == 9
    (cache / "dataset_info.json").write_text("{}")
    shutil.copy(saved, cache / "web-train.arrow")
    assert open_stream(Stream(TokenFiles(cache)), 0).num_samples == 9
    shutil.copy(saved, cache / "web-test.arrow")
    with pytest.raises(DataError, match="has the splits test, train; name one of them") as refused:
        open_stream(Stream(TokenFiles(cache)), 0)
    glob = refused.value.args[0].rpartition("them: ")[2].strip("'")
    assert open_stream(Stream(TokenFiles(glob)), 0).num_samples == 9


def test_padding_and_labels_of_a_dataset_are_noticed(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[5, 6, 7]] * 9, "attention_mask": [[1, 1, 1]] * 9}
    datasets.Dataset.from_dict({**rows, "labels": [[-100, 6, 7]] * 9}).save_to_disk(tmp_path / "a")
    with caplog.at_level(logging.WARNING):
        open_stream(Stream(TokenFiles(tmp_path / "a")), 0)
    assert "its column 'labels' is not read, so every token is a target" in caplog.text
    padded = {**rows, "attention_mask": [[1, 1, 0]] + [[1, 1, 1]] * 8}
    datasets.Dataset.from_dict(padded).save_to_disk(tmp_path / "b")
    with pytest.raises(DataError, match="'attention_mask' has zeros, so rows are padded"):
        open_stream(Stream(TokenFiles(tmp_path / "b")), 0)


@pytest.mark.parametrize("item", ["array", "tree", "tensor", "zstd", "tensor, zstd"])
def test_litdatas_items_are_headerless_arrays_in_any_loader(item, tmp_path):
    torch = pytest.importorskip("torch")
    loaders = pytest.importorskip("litdata.streaming.item_loader")
    documents = make_documents(100)
    items: list[Any] = list(documents)
    options: dict[str, Any] = {"chunk_bytes": 8000}
    if item == "tree":
        items = [{"tokens": each, "other": each.astype(np.int64)} for each in documents]
    if item.startswith("tensor"):
        items = [torch.from_numpy(each.astype(np.int32)) for each in documents]
        options["item_loader"] = loaders.TokensLoader()
    if item.endswith("zstd"):
        options |= {"compression": "zstd", "compression_level": "chunk"}
    tmp_path.joinpath("lit").mkdir()
    write_litdata(tmp_path / "lit", items, **options)
    stream = open_stream(Stream(local=tmp_path / "lit"), 0)
    assert stream.num_shards > 1
    lengths = [n for shard in range(stream.num_shards) for n in stream.shard_lengths(shard)]
    assert lengths == [len(each) for each in documents]


@pytest.mark.processes
def test_litdatas_compressed_chunks_are_fetched_once_from_a_remote(tmp_path, bucket):
    folder, server = bucket
    (folder / "lit").mkdir()
    options = {"compression": "zstd", "compression_level": "chunk", "chunk_bytes": 8000}
    write_litdata(folder / "lit", make_documents(), **options)
    stored = sum(path.stat().st_size for path in (folder / "lit").glob("*.bin"))
    expected = batches_of(make_dataset(Stream(local=folder / "lit")))
    remote = Stream(remote="s3://bucket/lit", local=tmp_path / "cache")
    assert_same(batches_of(make_dataset(remote)), expected)
    chunks = server.requests(r"chunk-.*\.bin$", "GET")
    assert sum(request.num_bytes for request in chunks) == stored


def test_what_litdata_compresses_in_batches_is_refused_by_name(tmp_path):
    write_litdata(tmp_path, make_documents(20), compression="zstd")
    with pytest.raises(DataError, match="compression_level is 'batch'"):
        open_stream(Stream(local=tmp_path), 0)
    with pytest.raises(ConfigError, match=r"has an index.json: .* Stream\(Shards\(local="):
        open_stream(Stream(TokenFiles(tmp_path)), 0)


def test_with_eos_a_stream_must_say_whether_its_documents_end_in_it(tmp_path):
    documents = [np.append(each, 7).astype("uint16") for each in make_documents(60)]
    write_megatron(tmp_path, documents)
    packing = Packing(max_seq_len=256, eos_id=7)
    with pytest.raises(ConfigError, match=r"TokenFiles\(files, has="):
        make_dataset(Stream(TokenFiles(tmp_path)), packing=packing)
    said = Stream(TokenFiles(tmp_path, has=("eos",)))
    plain = batches_of(make_dataset(Stream(TokenFiles(tmp_path))))
    assert_same(batches_of(make_dataset(said, packing=packing)), plain)


@pytest.mark.parametrize(("has", "end"), [(("eos",), []), ((), [7])])
def test_ends_that_are_not_as_stated_are_blamed_on_the_option(has, end, tmp_path):
    documents = [np.append(each, end).astype("uint16") for each in make_documents(60)]
    write_megatron(tmp_path, documents)
    packing = Packing(max_seq_len=256, eos_id=7)
    wrong = Stream(TokenFiles(tmp_path, has=has))
    with pytest.raises(DataError, match=re.escape(f"has={has} does not hold")) as refused:
        batches_of(make_dataset(wrong, packing=packing))
    assert "damaged" not in str(refused.value)
    command = refused.value.args[0].split("`")[1]
    command = command.replace("FILES", str(tmp_path)).replace("FOLDER", str(tmp_path / "index"))
    call_verb(*command.split()[1:])
    indexed = Stream(TokenFiles(tmp_path, index=tmp_path / "index"))
    assert len(batches_of(make_dataset(indexed, packing=packing))) > 5


@pytest.mark.parametrize(
    ("form", "dtype", "value"), [("megatron", "int32", -1), ("datatrove", "uint32", 2**31)]
)
def test_ids_outside_the_range_are_blamed_on_their_type(form, dtype, value, tmp_path):
    documents = make_documents(60, dtype=dtype)
    documents[5][0] = value
    write(form, tmp_path, documents)
    for option, way_out in (
        ({}, "rewrite them"),
        ({"tokens": f"tokens:{dtype}"}, "correct the type in tokens"),
    ):
        with pytest.raises(DataError, match=f"its tokens are read as {dtype}: {way_out}") as bad:
            batches_of(make_dataset(Stream(TokenFiles(tmp_path, **option))))
        assert "damaged" not in str(bad.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    "remote", ["a[1]", "a[1]/w?b.npy", "a[[]*/w[?]b.npy", "a[1]/w?b", "a*/*.npy"]
)
def test_names_in_stores_may_have_the_characters_of_patterns(remote, tmp_path, bucket, caplog):
    for folder in ("a[1]", "b"):
        write("olmo", bucket[0] / folder, make_documents(), "w?b")
    options: dict[str, Any] = {"format": "olmo", **options_of("olmo")}
    stream = Stream(TokenFiles(f"s3://bucket/{remote}", local=tmp_path / "cache", **options))
    assert open_stream(stream, 0).num_samples == 300
    assert "index.json" not in caplog.text
    assert "streampack index FILES --out FOLDER` write them" in caplog.text
    here = Stream(TokenFiles(bucket[0] / remote, **options))
    assert open_stream(here, 0).num_samples == 300


@pytest.mark.parametrize("name", ["run[1]", "a?", "web.npy"])
def test_a_folder_may_have_the_name_of_a_pattern_or_of_a_file(name, tmp_path):
    (tmp_path / name).mkdir()
    write_megatron(tmp_path / name, make_documents(10))
    assert open_stream(Stream(TokenFiles(tmp_path / name)), 0).num_samples == 10


def test_files_of_two_formats_need_a_format(tmp_path):
    write_megatron(tmp_path, make_documents(10))
    write_arrow(tmp_path, make_documents(10))
    with pytest.raises(ConfigError, match=r"megatron.*arrow"):
        open_stream(Stream(TokenFiles(tmp_path)), 0)
    assert open_stream(Stream(TokenFiles(tmp_path, format="arrow")), 0).num_samples == 10
    both = [tmp_path / "web.bin", tmp_path / "web.arrow"]
    with pytest.raises(ConfigError, match=r"web\.bin: is not a \.arrow file of arrow; list only"):
        open_stream(Stream(TokenFiles(both, format="arrow")), 0)
    with pytest.raises(ConfigError, match="'parquet'"):
        open_stream(Stream(TokenFiles(tmp_path, format="parquet")), 0)


@pytest.mark.parametrize("bos", [None, 5])
def test_documents_are_found_by_their_eos(bos, tmp_path, monkeypatch):
    monkeypatch.setattr(token_index, "PIECE_BYTES", 250)
    rng = np.random.default_rng(3)
    documents = [rng.integers(10, 1000, n).astype("uint16") for n in rng.integers(1, 60, 200)]
    head = [] if bos is None else [bos]
    inside = [] if bos is None else [7, 11]  # an EOS without a BOS after it
    whole = [np.concatenate([head, inside, each, [7]]).astype("uint16") for each in documents]
    tail = [9, 9, 9] if bos is None else []  # with a BOS it would belong to the last document
    tokens = np.concatenate([*whole, tail]).astype("uint16")
    (tmp_path / "raw").mkdir()
    tokens.tofile(tmp_path / "raw" / "part.npy")
    raw = Stream(TokenFiles(tmp_path / "raw", dtype="uint16"))
    with pytest.raises(DataError, match="streampack index FILES --eos-id"):
        open_stream(raw, 0)
    arguments = [str(tmp_path / "raw"), "--eos-id", "7", "--dtype", "uint16"]
    arguments += ["--out", str(tmp_path / "ends"), *(["--bos-id", "5"] if bos else [])]
    call_verb("index", *arguments)
    indexed = Stream(TokenFiles(tmp_path / "raw", index=tmp_path / "ends", dtype="uint16"))
    stream = open_stream(indexed, 0)
    lengths = [n for shard in range(stream.num_shards) for n in stream.shard_lengths(shard)]
    assert lengths == [len(each) for each in whole]
    write_stream(whole, tmp_path / "mds")
    expected = batches_of(make_dataset(Stream(local=tmp_path / "mds")))
    assert_same(batches_of(make_dataset(indexed)), expected)
