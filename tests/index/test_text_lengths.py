"""Indexes of texts: `streampack index --tokenizer`, and runs that know all lengths by them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import Buffers, ConfigError, DataError, PackedDataLoader, Texts
from streampack.texts import units
from streampack.texts.counts import as_npz, read_npz
from streampack.texts.pool import tokenizer_pool
from tests.helpers.chats import chat_tokenizer
from tests.helpers.faults.servers import s3_environment, s3_server
from tests.helpers.texts import dataset_of, source_of, texts, write_files, write_lines
from tests.helpers.verbs import call_verb

NAMES = ("rows.jsonl", "rows.parquet", "chats.jsonl")
LANES = {"order": {"num_lanes": 3}}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    monkeypatch.setattr(units, "SHARD_BYTES", 1000)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("texts"))


def index(folder: Path, name: str, out: object, *options: object) -> str:
    chat = ("--chat", "messages") if name.startswith("chats") else ()
    command = (folder / name, "--tokenizer", folder / "tokenizer", "--out", out, *chat)
    return call_verb("index", *command, *options)


def packs(dataset: Any) -> list[bytes]:
    return [batch["tokens"].numpy().tobytes() for batch in dataset]


def token_shards(cache: Path) -> list[Path]:
    return [path for path in (cache / "tokens").glob("??/*") if path.is_file()]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_gives_the_plan_of_texts_that_are_tokenized_first(folder, name, tmp_path):
    of_chats = name.startswith("chats")
    options = {"train_on": "each_response"} if of_chats else {}
    flags = ("--train-on", "each_response") if of_chats else ()
    said = index(folder, name, tmp_path / "index", *flags)
    num_shards = int(said.split(" in ")[1].split()[0])
    assert not list((tmp_path / "temporary").iterdir())

    if of_chats:
        bare = source_of(folder, name, tmp_path / "a", lengths="lazy", **options)
        with pytest.raises(ConfigError, match=r"index= after `streampack index --tokenizer`"):
            dataset_of(bare)
    given = options | {"lengths": "lazy", "index": tmp_path / "index"}
    indexed = dataset_of(source_of(folder, name, tmp_path / "a", **given), **LANES)
    loader = PackedDataLoader(indexed)
    assert len(indexed) > 0
    assert token_shards(tmp_path / "a") == []
    eager = dataset_of(source_of(folder, name, tmp_path / "b", **options), **LANES)
    assert (indexed.digest, len(indexed)) == (eager.digest, len(eager))
    assert packs(loader) == packs(eager)
    assert loader.stats()["shards"]["tokenized"] == num_shards == len(token_shards(tmp_path / "a"))


def test_a_file_of_arrays_is_written_as_by_the_oldest_numpy(monkeypatch):
    savez, names = np.savez, []

    def savez_of_2_0(file: Any, **arrays: Any) -> None:  # it has no options
        names.extend(arrays)
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", savez_of_2_0)
    assert read_npz(as_npz({"lengths": np.arange(3)})) is not None
    assert names == ["lengths"]


def test_with_local_the_token_shards_are_kept_for_a_run_by_any_number_of_processes(
    folder, tmp_path
):
    for number in (1, 3):
        out = tmp_path / f"index-{number}"
        index(folder, NAMES[0], out, "--num-workers", number, "--local", tmp_path / f"{number}")
        source = source_of(folder, NAMES[0], tmp_path / f"{number}", index=out)
        loader = PackedDataLoader(dataset_of(source))
        assert list(loader)
        assert loader.stats()["shards"]["tokenized"] == 0
    first, other = (tmp_path / f"index-{number}" / "lengths.npz" for number in (1, 3))
    assert first.read_bytes() == other.read_bytes()


def test_an_index_beside_the_data_is_no_data(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_lines(data / "a.jsonl", [{"text": text} for text in texts()])
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    said = [index(tmp_path, "data", data) for _ in range(2)]
    assert said[0] == said[1]
    assert list(dataset_of(source_of(tmp_path, "data", tmp_path / "cache", index=data), **LANES))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "special_tokens": ({"special_tokens": "text"}, "special_tokens='ids', .*special_tokens='text'"),
    "transform": (
        {"transform": "tests.helpers.transforms:slow"},
        "lengths for transform=None, .*transform=.*slow",
    ),
}


@pytest.mark.parametrize("option", OTHERS)
def test_an_index_of_another_option_is_refused_by_name(folder, option, tmp_path):
    index(folder, NAMES[0], tmp_path)
    options, says = OTHERS[option]
    source = source_of(folder, NAMES[0], tmp_path, index=tmp_path, lengths="eager", **options)
    with pytest.raises(ConfigError, match=rf"{says}.*streampack index"):
        dataset_of(source)


def test_an_index_is_of_the_version_of_a_transform(folder, tmp_path):
    slow = "tests.helpers.transforms:shout_or_leave_out"
    index(folder, NAMES[0], tmp_path, "--transform", slow, "--version", "2")
    given = {"index": tmp_path, "transform": slow}
    assert list(dataset_of(source_of(folder, NAMES[0], tmp_path, version="2", **given), **LANES))
    with pytest.raises(ConfigError, match=r"'version': '2'.*'version': '3'"):
        dataset_of(source_of(folder, NAMES[0], tmp_path, version="3", **given))


def changed(folder: Path, what: str) -> None:
    """Change a file or the tokenizer."""
    if what == "tokenizer":
        other = chat_tokenizer()
        other.add_tokens(["word"])
        other.save_pretrained(folder / "tokenizer")
    else:
        write_lines(folder / NAMES[0], [{"text": "a b"}])


@pytest.mark.parametrize("what", ["tokenizer", "files"])
def test_an_index_of_another_tokenizer_or_of_other_files_is_refused_by_name(what, tmp_path):
    folder = write_files(tmp_path)
    index(folder, NAMES[0], tmp_path / "index")
    changed(folder, what)
    source = source_of(folder, NAMES[0], tmp_path / "cache", index=tmp_path / "index")
    with pytest.raises(ConfigError, match=rf"the lengths for {what}=.*these texts have {what}="):
        dataset_of(source)
    index(folder, NAMES[0], tmp_path / "index")  # the way out
    assert list(dataset_of(source, **LANES))


def test_rows_that_changed_unnoticed_are_an_error_where_they_are_read(tmp_path):
    folder = write_files(tmp_path)
    rows = [{"text": "a b c d"} for _ in range(300)]  # more than the fingerprint reads
    write_lines(folder / NAMES[0], rows)
    index(folder, NAMES[0], tmp_path / "index")
    write_lines(folder / NAMES[0], [*rows[:-1], {"text": "a b d  "}])  # in as many bytes
    source = source_of(folder, NAMES[0], tmp_path / "cache", index=tmp_path / "index")
    dataset = dataset_of(source, **LANES)
    with pytest.raises(DataError, match=r"rows\.jsonl: .*other lengths than the index"):
        list(dataset)


def test_a_copy_of_another_time_needs_no_index_of_its_own(tmp_path):
    folder = write_files(tmp_path)
    index(folder, NAMES[0], tmp_path / "index")
    os.utime(folder / NAMES[0], (1, 1))
    source = source_of(folder, NAMES[0], tmp_path / "cache", index=tmp_path / "index")
    assert list(dataset_of(source, **LANES))


@pytest.mark.parametrize("name", ["lengths.npz", "rows.npz"])
def test_a_damaged_index_is_refused_or_has_no_lengths(folder, name, tmp_path):
    index(folder, NAMES[0], tmp_path / "index")
    path = tmp_path / "index" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    source = source_of(folder, NAMES[0], tmp_path / "cache", index=path.parent, lengths="lazy")
    with pytest.raises(ConfigError, match=r"is damaged; run `streampack index`|needs the lengths"):
        dataset_of(source, **LANES)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_lines_of_a_store_are_counted_and_indexed_into_it(folder, tmp_path):
    bucket = tmp_path / "store" / "texts-of-an-index"
    bucket.mkdir(parents=True)
    (bucket / NAMES[0]).write_bytes((folder / NAMES[0]).read_bytes())
    url = f"s3://{bucket.name}"
    with s3_server(tmp_path / "store", is_written=True) as s3, s3_environment(s3.url):
        tokenizer_pool(3).close()  # its processes have no such store
        command = (f"{url}/{NAMES[0]}", "--tokenizer", folder / "tokenizer", "--num-workers", 3)
        assert f"{url}/index/lengths.npz: 210 samples" in call_verb(
            "index", *command, "--out", f"{url}/index"
        )
        source = Texts(
            f"{url}/{NAMES[0]}", folder / "tokenizer", local=tmp_path / "c", index=f"{url}/index"
        )
        found = packs(dataset_of(source, buffers=Buffers(tokenizing=3), **LANES))
        tokenizer_pool(3).close()
    eager = dataset_of(source_of(folder, NAMES[0], tmp_path / "b"), **LANES)
    assert found == packs(eager)
