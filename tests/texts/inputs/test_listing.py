"""The files given by paths, globs and dataset folders."""

from __future__ import annotations

import json
import os
import re
from itertools import chain
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from streampack.errors import DataError
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.units import uncounted_units
from tests.helpers.inputs import TEXT, rows_of, write_rows, write_table


def names(*inputs: Path | str, below: Path) -> list[str]:
    """Return the files of inputs, relative to a folder."""
    return [
        str(Path(file.uri).relative_to(below)) for file in list_inputs([str(i) for i in inputs])
    ]


def make(folder: Path, *paths: str) -> None:
    """Write a file of rows at each path."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / path, [path])


def test_files_have_format_compression_size_and_version(tmp_path):
    make(tmp_path, "rows.JSONL.zst")

    [file] = list_inputs([str(tmp_path)])

    status = (tmp_path / "rows.JSONL.zst").stat()
    assert (file.format, file.compression, file.num_bytes) == ("jsonl", "zst", status.st_size)
    assert file.version == f"size:{status.st_size},mtime_ns:{status.st_mtime_ns}"


def test_a_folder_gives_all_files_that_are_not_hidden_sorted(tmp_path):
    make(tmp_path, "b/2.txt", "a.md", "b/10.txt", ".git/x.txt", "b/.h.txt", "README.md")
    (tmp_path / "_SUCCESS").touch()

    assert names(tmp_path, below=tmp_path) == ["README.md", "a.md", "b/10.txt", "b/2.txt"]
    assert names(f"file://{tmp_path}", below=tmp_path) == names(tmp_path, below=tmp_path)


def test_globs(tmp_path):
    make(tmp_path, "a/1.jsonl", "a/b/2.jsonl", "a/b/3.jsonl.zst", "c.jsonl", "d.txt")
    (tmp_path / "e.jsonl").mkdir()

    assert names(tmp_path / "**/*.jsonl", below=tmp_path) == ["a/1.jsonl", "a/b/2.jsonl", "c.jsonl"]
    assert names(tmp_path / "a/*/[3-9].*", below=tmp_path) == ["a/b/3.jsonl.zst"]


@pytest.mark.parametrize("named", ["", "*.jsonl"])
def test_a_link_to_nothing_is_refused_until_it_is_deleted(tmp_path, named):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")

    with pytest.raises(DataError, match=r"b\.jsonl: .* restore it, or delete the link"):
        list_inputs([str(tmp_path / named)])

    (tmp_path / "b.jsonl").unlink()
    assert len(list_inputs([str(tmp_path / named)])) == 1


def test_linked_folders_are_read_as_if_they_were_there(tmp_path):
    make(tmp_path, "elsewhere/b/2.txt", "in/1.txt", "in/3.txt")
    (tmp_path / "in" / "2").symlink_to(tmp_path / "elsewhere")

    for named in ("in", "in/*", "in/**/*.txt", "i*"):
        found = names(tmp_path / named, below=tmp_path)
        assert found == ["in/1.txt", "elsewhere/b/2.txt", "in/3.txt"]


@pytest.mark.parametrize("target", ["in", "in/b", "."])
def test_a_link_to_a_folder_that_is_read_already_is_refused_until_it_is_deleted(tmp_path, target):
    make(tmp_path, "in/b/1.txt")
    (tmp_path / "in" / "x").symlink_to(tmp_path / target)

    for named in ("in", "in*"):
        with pytest.raises(DataError, match=r"is a link to a folder that is read as .* delete the"):
            list_inputs([str(tmp_path / named)])
    with pytest.raises(DataError, match="named twice"):
        list_inputs([str(tmp_path / "in/**/*.txt")])

    (tmp_path / "in" / "x").unlink()
    assert names(tmp_path / "in", below=tmp_path) == ["in/b/1.txt"]


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path, monkeypatch):
    make(tmp_path, "in/a/1.txt", "in/b.txt")
    scandir = os.scandir

    def scandir_without_a(path):  # root may list everything
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_without_a)

    with pytest.raises(DataError, match=r"in/a: may not be listed \(Permission denied\); change"):
        list_inputs([str(tmp_path / "in")])


def test_a_file_is_known_under_any_spelling(tmp_path, monkeypatch):
    make(tmp_path, "in/a.txt")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "latest.txt").symlink_to("a.txt")
    monkeypatch.chdir(tmp_path / "in")
    spellings = ["a.txt", "./a.txt", "../in/a.txt", "../link/a.txt", "latest.txt", "[a].txt"]

    for spelling in (*spellings, f"file://{tmp_path}/link/a.txt"):
        assert [file.uri for file in list_inputs([spelling])] == [f"{tmp_path}/in/a.txt"]
        with pytest.raises(DataError, match="is named twice"):
            list_inputs([str(tmp_path / "in/a.txt"), spelling])


def test_a_name_with_brackets_is_found_as_it_is(tmp_path):
    make(tmp_path, "a[1].txt")

    assert names(tmp_path / "a[1].txt", below=tmp_path) == ["a[1].txt"]


@pytest.mark.parametrize(
    "name", ["x.txt", "*.jsonl", "a**", "empty", "b.yaml", "d.parquet.gz", "."]
)
def test_what_names_no_file_of_rows_is_refused(tmp_path, name):
    make(tmp_path, "a.txt")
    (tmp_path / "empty").mkdir()
    for other in ("b.yaml", "d.parquet.gz"):
        (tmp_path / other).touch()
    with pytest.raises(DataError, match="b.yaml" if name == "." else re.escape(name)):
        list_inputs([str(tmp_path / name)])


def dataset(count: int, word: str = "row") -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"{word} {number}" for number in range(count)]})


def texts(path: Path) -> list[str]:
    rows, bad = rows_of(chain.from_iterable(uncounted_units(list_inputs([str(path)]), TEXT, 200)))
    assert bad == []
    return [text for _, text in rows]


def test_a_selection_that_was_saved_gives_the_selected_rows(tmp_path):
    dataset(30).shuffle(seed=1).select(range(7)).save_to_disk(tmp_path / "saved")

    assert texts(tmp_path / "saved") == dataset(30).shuffle(seed=1).select(range(7))["text"][:]


def test_a_saved_dataset_with_one_split_needs_no_choice(tmp_path):
    datasets.DatasetDict(train=dataset(9)).save_to_disk(tmp_path / "saved")

    assert texts(tmp_path / "saved") == dataset(9)["text"][:]


def test_the_cache_of_datasets_gives_its_rows_once(tmp_path):
    make(tmp_path, "rows.jsonl")
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache")
    )["train"]
    loaded.map(lambda row: {"text": row["text"].upper()})  # adds a cache-*.arrow next to it
    folder = Path(loaded.cache_files[0]["filename"]).parent
    assert len(list(folder.glob("*.arrow"))) == 2
    (folder / "tmpab12cd34").touch()  # left behind by a map that was killed

    assert texts(folder) == ["rows.jsonl"]


def parquet_repository(folder: Path, *splits: str) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nconfigs: []\n---\n")
    for split in splits:
        table = pa.table({"text": [split]})
        name = f"{split.split()[0]}-00000-of-00001.parquet"
        write_table(folder / "data" / name, table, 9)


def test_a_repository_of_parquet_files_gives_its_rows_without_its_card(tmp_path):
    parquet_repository(tmp_path, "train")

    assert texts(tmp_path) == ["train"]


def saved(folder: Path) -> Path:
    splits = datasets.DatasetDict(train=dataset(1, "train"), test=dataset(1, "test"))
    splits.save_to_disk(folder / "saved")
    return folder / "saved"


def in_the_cache(folder: Path) -> Path:
    for split in ("train", "test"):
        write_rows(folder / f"{split}.jsonl", [f"{split} 0"])
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))
    return Path(loaded["train"].cache_files[0]["filename"]).parent


def of_parquet_files(folder: Path) -> Path:
    parquet_repository(folder, "train 0", "test 0")
    return folder


@pytest.mark.parametrize("kind", [saved, in_the_cache, of_parquet_files])
def test_a_folder_with_splits_names_one_that_is_read(tmp_path, kind):
    with pytest.raises(DataError, match=r"has the splits .*; name one of them: ") as refused:
        list_inputs([str(kind(tmp_path))])
    assert texts(Path(way_out(refused.value))) == ["train 0"]


def way_out(error: DataError) -> str:
    return str(error).rpartition(": ")[2].strip("'")


def test_a_cache_of_the_hub_is_refused_with_the_folder_of_a_revision(tmp_path):
    folder = tmp_path / "datasets--org--name"
    for revision in ("aaa", "bbb"):
        parquet_repository(folder / "snapshots" / revision, "train")
        file = folder / "snapshots" / revision / "data" / "train-00000-of-00001.parquet"
        blob = folder / "blobs" / revision
        blob.parent.mkdir(exist_ok=True)
        write_table(folder / "new.parquet", pa.table({"text": [revision]}), 9).replace(blob)
        file.unlink()
        file.symlink_to(blob)

    with pytest.raises(DataError, match=r"has the files of the revisions aaa, bbb; name") as info:
        list_inputs([str(folder)])
    assert texts(Path(way_out(info.value))) == ["aaa"]


def test_tables_that_are_named_like_a_cache_are_read(tmp_path):
    make(tmp_path, "cache-of-questions.arrow", "tmp.arrow")

    assert names(tmp_path, below=tmp_path) == ["cache-of-questions.arrow", "tmp.arrow"]


def test_files_of_rows_beside_tables_are_read_too(tmp_path):
    make(tmp_path, "a.parquet", "b.jsonl")
    (tmp_path / "dataset_info.json").write_text(json.dumps({}))

    assert names(tmp_path, below=tmp_path) == ["a.parquet", "b.jsonl"]
