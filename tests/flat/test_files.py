"""Token files: which of them are read, in which version, and how many tokens they hold."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import PackedDataLoader, PackedStreamingDataset, Packing, Stream, TokenFiles, World
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.flat import token_file
from streampack.flat.files import split_source
from streampack.index.token_index import index_files
from streampack.streams import open_stream
from streampack.streams.token_stream import TokenStream
from streampack.write import write_stream
from tests.helpers.builders import ReadOnlyDisk
from tests.helpers.flat import (
    Documents,
    make_documents,
    options_of,
    source_of,
    write,
    write_megatron,
)

FLAT = ("megatron", "olmo", "datatrove", "arrow")
FILES = {
    "megatron": ("web.bin", "web.idx"),
    "olmo": ("web.npy", "web.csv.gz"),
    "datatrove": ("web.ds", "web.ds.index"),
    "arrow": ("web.arrow", "web.arrow"),
}


@pytest.fixture(autouse=True)
def small_cells(monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", 4096)


def opened(form: str, folder: Path, **options: Any) -> TokenStream:
    return open_stream(Stream(source_of(form, folder, **options)), 0)


def read(stream: TokenStream) -> list[list[int]]:
    shards = map(stream.open_shard, range(stream.num_shards))
    return [
        each.tokens.read(each.data, row).tolist()
        for each in shards
        for row in range(len(each.tokens.counts))
    ]


def loader_of(stream: Stream) -> PackedDataLoader:
    dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=64), world=World())
    return PackedDataLoader(dataset, prefetch_threads=0)


def as_lists(documents: Documents) -> list[list[int]]:
    return [each.tolist() for each in documents]


def test_a_list_may_name_files_of_two_disks_but_not_of_two_stores(tmp_path):
    assert split_source(["/a/x.ds", "/b/y.ds"]) == ("/", ["a/x.ds", "b/y.ds"], "")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        for folder in (tmp_path, Path(other)):
            write("megatron", folder, make_documents(20))
        stream = open_stream(Stream(TokenFiles([tmp_path / "web.bin", Path(other, "web.bin")])), 0)
        assert (stream.name, stream.num_samples) == ("/", 40)
        assert read(stream) == 2 * as_lists(make_documents(20))
    for urls in (["s3://one/a.ds", "s3://two/b.ds"], ["s3://one/a.ds", "/b.ds"]):
        with pytest.raises(ConfigError, match=r"in several stores; .* in a Stream for each"):
            split_source(urls)


@pytest.mark.parametrize("source", ["", "*/*.bin"])
def test_linked_folders_are_read(source, tmp_path):
    for name in ("corpus/a", "disk"):
        write("megatron", tmp_path / name, make_documents(20))
    (tmp_path / "corpus" / "b").symlink_to(tmp_path / "disk")
    local = f"{tmp_path}/corpus/{source}"
    assert open_stream(Stream(TokenFiles(local)), 0).num_samples == 40
    (tmp_path / "disk" / "again").symlink_to(tmp_path / "corpus")
    with pytest.raises(DataError, match=r"again: is a link to a folder that is read as .*corpus"):
        open_stream(Stream(TokenFiles(local)), 0)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("form", FLAT)
def test_files_that_are_written_again_give_the_new_tokens(form, in_place, tmp_path):
    one, others = make_documents(60), [each + 1 for each in make_documents(60)]
    for documents in (one, others, others[::-1]):  # the last ones have the total of the others
        new = tmp_path / ("data" if in_place else "new")
        write(form, new, documents)
        if not in_place:
            for path in (tmp_path / "data").glob("*"):
                path.unlink()
            new.rename(tmp_path / "data")
        assert read(opened(form, tmp_path / "data")) == as_lists(documents)


@pytest.mark.parametrize("form", FLAT)
def test_hashes_of_an_index_are_compared_again_after_a_change(form, tmp_path):
    folder, index = tmp_path / "data", tmp_path / "index"
    dtype = options_of(form).get("dtype")
    write(form, folder, make_documents(60))
    list(index_files(str(folder), index, dtype=dtype))
    assert read(opened(form, folder, index=index)) == as_lists(make_documents(60))
    changed = [each + 1 for each in make_documents(60)]
    write(form, folder, changed)
    assert read(opened(form, folder)) == as_lists(changed)  # those shards are open now
    with pytest.raises(DataError, match="not those that were indexed"):
        read(opened(form, folder, index=index))


@pytest.mark.parametrize("form", FLAT)
def test_files_that_changed_since_they_were_opened_are_refused(form, tmp_path):
    write(form, tmp_path, make_documents(60))
    stream = opened(form, tmp_path)
    write(form, tmp_path, [each + 1 for each in make_documents(60)])
    with pytest.raises(DataError, match=f"{FILES[form][0]}: was changed since the stream was op"):
        read(stream)


@pytest.mark.parametrize(("form", "which"), [(form, n) for form in FLAT for n in (0, 1)])
def test_files_that_are_deleted_are_refused(form, which, tmp_path):
    write(form, tmp_path, make_documents(60))
    loader = loader_of(Stream(source_of(form, tmp_path)))
    (tmp_path / FILES[form][which]).unlink()
    if (form, which) == ("olmo", 1):  # its table is in memory
        assert len(list(loader)) > 9
        return
    with pytest.raises(DataError, match=f"{FILES[form][which]}.* put the file back"):
        list(loader)


def test_a_whole_cache_is_read_from_a_disk_that_is_read_only(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    store, documents = fsspec.filesystem("memory"), make_documents(60)
    write_megatron(tmp_path, documents)
    for name in FILES["megatron"]:
        store.pipe(f"/read-only/web/{name}", (tmp_path / name).read_bytes())
    remote = Stream(
        TokenFiles("memory://read-only/web/", local=tmp_path / "cache", format="megatron")
    )
    with pytest.raises(DataError, match="cannot be written"):
        open_stream(remote, 0, disk=ReadOnlyDisk())
    for disk in (None, ReadOnlyDisk()):
        assert read(open_stream(remote, 0, disk=disk)) == as_lists(documents)
    store.rm("/read-only", recursive=True)


def write_with_gaps(form: str, folder: Path, documents: Documents) -> Documents:
    """Write documents with other bytes between them where the format allows; return the rest."""
    folder.mkdir()
    write(form, folder, documents)
    if form != "olmo":
        return documents  # Arrow has other columns between those of its record batches
    table = folder / "web.csv.gz"
    lines = gzip.decompress(table.read_bytes()).splitlines(keepends=True)
    table.write_bytes(gzip.compress(b"".join(lines[1::2])))
    return documents[1::2]


@pytest.mark.parametrize("form", ["mds", *FLAT])
def test_tokens_are_those_of_documents_and_one_digest_covers_lengths(form, tmp_path):
    documents = make_documents()
    if form == "mds":
        write_stream(documents, tmp_path / "data", size_limit=4096)
        stream = open_stream(Stream(local=tmp_path / "data"), 0)
    else:
        documents = write_with_gaps(form, tmp_path / "data", documents)
        stream = opened(form, tmp_path / "data")
        dtype = options_of(form).get("dtype")
        list(index_files(str(tmp_path / "data"), tmp_path / "index", dtype=dtype))
        indexed = opened(form, tmp_path / "data", index=tmp_path / "index")
        assert indexed.full_digest == stream.full_digest
        np.testing.assert_array_equal(indexed.shard_tokens(), stream.shard_tokens())
    lengths = [stream.shard_lengths(shard) for shard in range(stream.num_shards)]
    assert len(lengths) > 3
    assert np.concatenate(lengths).tolist() == [len(each) for each in documents]
    assert stream.shard_tokens().tolist() == [each.sum() for each in lengths]
    assert stream.total_tokens() == sum(map(len, documents))


@pytest.mark.parametrize("sequences", [1, 3])
def test_tokens_of_megatrons_documents_are_those_of_their_sequences(sequences, tmp_path):
    documents = make_documents()
    write_megatron(tmp_path, documents, sequences=sequences)
    for unit in ("document", "sequence"):
        stream = opened("megatron", tmp_path, unit=unit)
        tokens = [stream.shard_lengths(shard).sum() for shard in range(stream.num_shards)]
        assert stream.shard_tokens().tolist() == tokens


@pytest.mark.parametrize("form", FLAT)
def test_a_state_is_refused_once_documents_are_in_another_order(form, tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "CELL_BYTES", 1 << 20)  # so that shards stay the same
    documents = make_documents(80)
    stream = Stream(source_of(form, tmp_path))
    write(form, tmp_path, documents)
    loader = loader_of(stream)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    (saved,) = state["fingerprint"]["streams"]
    write(form, tmp_path, [documents[n] for n in np.random.default_rng(0).permutation(80)])
    with pytest.raises(ResumeError, match="its length file, or the table of a token file, was"):
        loader_of(stream).load_state_dict(state)
    # A state of an earlier release has no digest of lengths, and is taken if the rest agrees.
    write(form, tmp_path, documents)
    state["fingerprint"]["streams"] = [saved.partition(":")[0]]
    resumed = loader_of(stream)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == len(list(batches))
