"""The table of text shards: each kind of input, counted once, cut by the files alone, read back."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import datasets
import fsspec
import litdata
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from streaming import MDSWriter

from streampack.cli.index import run_index
from streampack.cli.verbs import Index
from streampack.errors import ConfigError, DataError
from streampack.stores.drivers import DriverStore
from streampack.texts import counts, units
from streampack.texts.inputs import sources
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.slices import InputSlice
from streampack.texts.inputs.values import RowSelection
from streampack.texts.table import TextTable, decode_unit, open_table, read_shard
from tests.helpers.examples import examples
from tests.helpers.inputs import TEXT, csv_text, jsonl, packed, write_rows, write_table

TEXTS = [f"{number} é日本 " * (number % 7) for number in range(300)]
KB = 1 << 10


@pytest.fixture
def small(monkeypatch):
    """Shards of 4 KiB, and units of up to 16 KiB, so that small files have several."""
    monkeypatch.setattr(units, "SHARD_BYTES", 4 * KB)
    monkeypatch.setattr(units, "UNIT_BYTES", 16 * KB)


def rows_of(
    table: TextTable, folder: Path, selection: RowSelection = TEXT
) -> tuple[list[Any], list[tuple[str, int, str]]]:
    """Return the value of each row of a table, None where it has none, and the bad rows."""
    values: list[Any] = []
    bad: list[tuple[str, int, str]] = []
    for number in range(len(table)):
        shard = table.shard(number)
        decoded = None
        if shard.decoded_bytes:
            decoded = folder / f"decoded-{hash(shard.units)}"
            if not decoded.exists():
                decode_unit(shard, selection, decoded)
        found: list[Any] = [None] * shard.num_rows
        for batch in read_shard(shard, selection, decoded=decoded):
            for row, value in zip(batch.rows, batch.values, strict=True):
                assert found[row] is None
                found[row] = value
            bad += [(each.uri, each.row, each.reason) for each in batch.bad]
        values += found
    return values, bad


def opened(path: Any, cache: Path, selection: RowSelection = TEXT, **options: Any) -> TextTable:
    return open_table(path, selection, cache, **options)


def opened_with_index(url: str, folder: Path) -> TextTable:
    """Return the table of files of a store, whose lines are counted first."""
    if ".jsonl" not in url and ".csv" not in url:
        return opened(url, folder)
    run_index(Index(paths=[url], out=folder / "index"))
    return opened(url, folder, index=str(folder / "index"))


def write_mds(folder: Path, **options: Any) -> Path:
    columns = {"id": "int", "text": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=6 * KB, **options) as writer:
        for number, text in enumerate(TEXTS):
            writer.write({"id": number, "text": text})
    return folder


def write_litdata(
    folder: Path, row: Any = lambda text: {"text": text, "id": 1}, **options: Any
) -> Path:
    writer = litdata.streaming.writer.BinaryWriter(str(folder), chunk_size=30, **options)
    for number, text in enumerate(TEXTS):
        writer[number] = row(text)
    writer.done()
    writer.merge()
    return folder


def write_many(folder: Path, suffix: str = "jsonl") -> Path:
    folder.mkdir()
    for number in range(30):
        write_rows(folder / f"{number:02}.{suffix}", TEXTS[10 * number : 10 * number + 10])
    return folder


def write_tabs(path: Path) -> Path:
    lines = "".join(f"{number}\t{text}\n" for number, text in enumerate(TEXTS))
    path.write_bytes(packed(f"id\ttext\n{lines}".encode(), path.suffix))
    return path


def arrow_file(path: Path) -> Path:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, 20)
    return path


INPUTS = {
    **{
        suffix: lambda path, suffix=suffix: write_rows(path / f"a.{suffix}", TEXTS, 20)
        for suffix in ("jsonl", "jsonl.zst", "jsonl.gz", "csv", "csv.gz", "parquet", "arrow")
    },
    "tsv.gz": lambda path: write_tabs(path / "a.tsv.gz"),
    "large groups": lambda path: write_rows(path / "large.parquet", TEXTS, 250),
    "large batches": lambda path: write_rows(path / "large.arrow", TEXTS, 250),
    "dictionaries": lambda path: write_table(
        path / "dict.arrow", pa.table({"text": pa.array(TEXTS).dictionary_encode()}), 50
    ),
    "arrow file": lambda path: arrow_file(path / "file.arrow"),
    "save_to_disk": lambda path: saved(path / "saved"),
    "mds": lambda path: write_mds(path / "mds"),
    "mds zstd": lambda path: write_mds(path / "mds", compression="zstd", hashes=["xxh64"]),
    "litdata": lambda path: write_litdata(path / "lit"),
    "litdata zstd": lambda path: write_litdata(path / "lit", compression="zstd"),
    "litdata texts": lambda path: write_litdata(
        path / "lit", str, compression="zstd", compression_level="chunk"
    ),
    "litdata lists": lambda path: write_litdata(path / "lit", lambda text: [text, b""]),
    "many files": lambda path: write_many(path / "many"),
    "many tables": lambda path: write_many(path / "many", "parquet"),
    "list": lambda _: [{"text": text, "id": 1} for text in TEXTS],
    "texts": lambda _: list(TEXTS),
    "pandas": lambda _: pd.DataFrame({"text": TEXTS}),
    "pyarrow": lambda _: pa.table({"id": range(300), "text": TEXTS}),
    "datasets": lambda _: datasets.Dataset.from_dict({"text": TEXTS}),
    "selected": lambda _: datasets.Dataset.from_dict({"text": TEXTS[::-1]}).select(
        range(299, -1, -1)
    ),
    "transformed": lambda _: datasets.Dataset.from_dict({"text": TEXTS}).with_transform(
        lambda batch: {"text": [f"{text}" for text in batch["text"]]}
    ),
    "mapped": lambda path: datasets.load_from_disk(saved(path / "saved")),
}


def saved(path: Path) -> str:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path, num_shards=3)
    return str(path)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.usefixtures("small")
def test_the_shards_of_any_input_have_its_rows_in_order(kind, tmp_path):
    selection = RowSelection("text", "0") if kind == "litdata lists" else TEXT
    table = opened(INPUTS[kind](tmp_path), tmp_path / "cache", selection)
    values, bad = rows_of(table, tmp_path, selection)
    assert values == TEXTS
    assert bad == []
    assert int(table.first_sample[-1]) == table.cut.rows.sum() == len(TEXTS)
    assert len(table) > 2
    places = [table.shard(n).place(r) for n in range(len(table)) for r in range(table.cut.rows[n])]
    files, rows = table.cut.units.files, np.diff(table.before[table.cut.units.of_file])
    names = ["rows" if table.memory else file.uri for file in files]
    counts = zip(names, rows.tolist(), strict=True)
    assert places == [(name, row) for name, num in counts for row in range(num)]


def test_a_dataset_that_maps_files_is_read_where_it_is(tmp_path):
    table = opened(INPUTS["mapped"](tmp_path), tmp_path / "cache")
    assert {Path(file.uri).parent for file in table.cut.units.files} == {tmp_path / "saved"}
    assert not (tmp_path / "cache" / "rows").exists()
    changed = datasets.load_from_disk(str(tmp_path / "saved")).rename_column("text", "body")
    renamed = opened(changed, tmp_path / "cache", RowSelection("text", "body"))
    assert rows_of(renamed, tmp_path, RowSelection("text", "body"))[0] == TEXTS
    part = datasets.load_from_disk(str(tmp_path / "saved")).select(range(50, 250))
    assert rows_of(opened(part, tmp_path / "cache"), tmp_path)[0] == TEXTS[50:250]


@given(st.lists(st.integers(0, 9), max_size=60), st.booleans())
@examples(20)
def test_lines_are_rows_of_the_table_whatever_they_hold(kinds, ends):
    lines = [
        b"",
        b"  ",
        b'{"text": "a"}',
        b"[1]",
        b"x" * 3000,
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
        b'{"text": "' + b"y" * 5000 + b'"}',
        b'{"other": 1}',
        b"\xff",
    ]
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        patch.setattr(units, "SHARD_BYTES", 4 * KB)
        data = b"\n".join(lines[kind] for kind in kinds) + b"\n" * ends
        path = folder / "a.jsonl"
        path.write_bytes(b'{"text": "z"}\n' + data)
        table = opened(path, folder)
        assert (
            table.cut.rows.sum()
            == (b'{"text": "z"}\n' + data.removesuffix(b"\n")).count(b"\n") + (1 if data else 0)
            if data
            else 1
        )
        values, bad = rows_of(table, folder)
        [whole] = list_inputs([str(path)])
        expected: list[Any] = [None] * len(values)
        expected_bad = []
        for batch in read_rows(whole, TEXT):
            for row, value in zip(batch.rows, batch.values, strict=True):
                expected[row] = value
            expected_bad += [each.row for each in batch.bad]
        assert values == expected
        assert [row for _, row, _ in bad] == expected_bad
        assert {uri for uri, *_ in bad} <= {str(path)}


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.usefixtures("small")
def test_csv_is_cut_between_rows_and_not_within_quotes(suffix, tmp_path):
    rows = [[str(n), 'a "b",\n\n' * (n % 90) + f"{n}"] for n in range(200)]
    data = csv_text([["id", "text"], *rows])
    if suffix == "tsv":
        data = "".join(f"{'	'.join(row)}\n" for row in [["id", "text"], *_plain(rows)]).encode()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"\xef\xbb\xbf" + data)
    table = opened(path, tmp_path)
    values, bad = rows_of(table, tmp_path)
    expected = _plain(rows) if suffix == "tsv" else rows
    assert (values, bad) == ([text for _, text in expected], [])
    assert len(table) > 2


def _plain(rows: list[list[str]]) -> list[list[str]]:
    return [[number, text.replace("\n", " ").replace('"', "")] for number, text in rows]


@pytest.mark.usefixtures("small")
def test_a_bad_row_is_named_by_its_file_and_its_row_there(tmp_path):
    lines = jsonl(["a" * 100] * 200).splitlines(keepends=True)
    lines[150] = b"{\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    table = opened(tmp_path / "a.jsonl", tmp_path)
    [bad] = rows_of(table, tmp_path)[1]
    assert bad[:2] == (str(tmp_path / "a.jsonl"), 150)
    shard = int(np.searchsorted(table.first_sample, 150, "right")) - 1
    assert table.shard(shard).place(150 - int(table.first_sample[shard])) == bad[:2]

    folder = write_many(tmp_path / "many")
    (folder / "17.jsonl").write_bytes(b"\n[]\n" + jsonl(["x"]))
    table = opened(folder, tmp_path)
    [bad] = rows_of(table, tmp_path)[1]
    assert bad[:2] == (str(folder / "17.jsonl"), 1)
    shard = int(np.searchsorted(table.first_sample, 171, "right")) - 1
    assert len(table.shard(shard).units) > 1
    assert table.shard(shard).place(171 - int(table.first_sample[shard])) == bad[:2]


@pytest.mark.parametrize("rows", ["list", "pyarrow"])
def test_half_of_a_surrogate_pair_makes_its_row_bad_and_no_other(rows, tmp_path):
    given = [{"text": "a"}, {"text": "b\ud800"}, {"text": "c"}]
    if rows == "pyarrow":
        invalid = pa.array([b"a", b"b\xed\xa0\x80", b"c"]).view(pa.string())
        given = pa.table({"text": invalid})
    values, bad = rows_of(opened(given, tmp_path), tmp_path)
    assert values == ["a", None, "c"]
    assert bad[0][:2] == ("rows", 1)


@pytest.mark.usefixtures("small")
def test_many_small_files_share_shards_and_stay_whole(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number:03}.txt").write_text(f"{number} " * 50)
    table = opened(folder, tmp_path)
    assert 3 <= len(table) <= 10
    assert table.cut.rows.sum() == 100
    assert all(unit.start == 0 and unit.stop == -1 for unit in table.shard(1).units)
    assert rows_of(table, tmp_path)[0][42] == "42 " * 50


@pytest.mark.usefixtures("small")
def test_the_cut_is_a_function_of_the_files_alone(tmp_path):
    names = ("a.jsonl", "b.parquet", "c.csv")
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        for name in names:
            write_rows(tmp_path / root / name, TEXTS, 20)
    one = opened(str(tmp_path / "one" / "*.*"), tmp_path / "cache")
    two = opened(str(tmp_path / "two"), tmp_path / "other")
    assert one.digest() == two.digest()
    assert (one.cut.rows == two.cut.rows).all()
    write_rows(tmp_path / "two" / "c.csv", TEXTS[1:])
    assert opened(str(tmp_path / "two"), tmp_path / "other").digest() != one.digest()


def test_shards_grow_with_the_text_in_powers_of_two():
    mib = 1 << 20
    assert units.shard_bytes(1) == units.shard_bytes(256 << 30) == 4 * mib
    assert units.shard_bytes((512 << 30) + 1) == 16 * mib
    files = [InputSlice("/a.jsonl", "v", "jsonl", None, 0, -1, 8000 * 4 * mib)]
    ends = np.arange(1, 8001) * 4 * mib
    pieces = np.stack([ends - 4 * mib, ends, ends * 0 + 10, ends * 0 + 4 * mib] * 1, 1)
    pieces = np.concatenate([pieces, pieces[:, 3:]], 1)
    fine = units.cut_pieces(files, pieces, np.array([8000]))
    pieces[:, 3] *= 64  # as if each had 256 MiB
    files = [replace(files[0], format="arrow")]
    coarse = units.cut_pieces(files, pieces, np.array([8000]))
    assert len(fine.rows) == 8000
    assert fine.rows.sum() == coarse.rows.sum() == 80000


class Reads:
    """Counts the bytes that files of lines are read for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        original = units.read_pieces

        def counted(*args: Any) -> Any:
            for piece in original(*args):
                self.num_bytes += len(piece)
                yield piece

        monkeypatch.setattr(units, "read_pieces", counted)


@pytest.mark.usefixtures("small")
def test_each_version_of_a_file_is_counted_once_wherever_it_has_changed(tmp_path, monkeypatch):
    reads = Reads(monkeypatch)
    path = write_rows(tmp_path / "a.jsonl", ["a" * 100] * 1000)
    size = path.stat().st_size
    first = opened(path, tmp_path)
    assert reads.num_bytes == size
    assert opened(path, tmp_path).digest() == first.digest()
    assert reads.num_bytes == size

    # Two rows become one of as many bytes, and others are appended.
    first_bytes, other_bytes = 2 * len(jsonl(["a" * 100])), len(jsonl([""]))
    edited = ["c" * (first_bytes - other_bytes), *["a" * 100] * 998, *["b" * 100] * 50]
    path.write_bytes(jsonl(edited).removesuffix(b"\n"))
    assert rows_of(opened(path, tmp_path), tmp_path)[0] == edited


def test_damaged_counts_are_made_again(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", TEXTS)
    table = opened(path, tmp_path)
    [stored] = (tmp_path / "tables").rglob("*.npz")
    stored.write_bytes(stored.read_bytes()[:100])
    assert opened(path, tmp_path).digest() == table.digest()


@pytest.mark.parametrize("kind", ["list", "pyarrow", "selected"])
def test_rows_in_memory_are_written_once(kind, tmp_path):
    table = opened(INPUTS[kind](tmp_path), tmp_path)
    [file] = [
        path for path in (tmp_path / "rows").rglob("*") if path.suffix != ".lock" and path.is_file()
    ]
    written = file.stat()
    assert opened(INPUTS[kind](tmp_path), tmp_path).digest() == table.digest()
    assert file.stat() == written
    assert opened(INPUTS[kind](tmp_path), tmp_path / "other").cut.units.files[0].version == (
        table.cut.units.files[0].version
    )


@pytest.mark.parametrize("kind", ["list", "pyarrow", "selected"])
def test_rows_in_memory_are_written_whole_and_leave_nothing_else(kind, tmp_path):
    cache = tmp_path / "cache"
    opened(INPUTS[kind](tmp_path), cache)
    [path] = [each for each in cache.glob("rows/*/*") if each.suffix != ".lock"]
    data = path.read_bytes()
    left = path.with_name(f".{path.name}.{'0' * 32}")
    left.write_bytes(data[:100])  # by a process that was killed
    os.truncate(path, 100) if kind == "list" else path.unlink()  # after a crash of the machine
    opened(INPUTS[kind](tmp_path), cache)
    assert path.read_bytes() == data
    assert not left.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rows").touch()
    with pytest.raises(DataError, match=r"cannot be written .* (\d+) bytes are needed") as refused:
        opened(INPUTS[kind](tmp_path), tmp_path / "full")
    needed = int(re.findall(r"(\d+) bytes are needed", str(refused.value))[0])
    assert len(data) / 4 < needed <= 2 * len(data)


def test_two_hundred_thousand_shards_open_in_a_second_and_100_mib(tmp_path):
    num, path = 200_000, tmp_path / "a.parquet"
    with path.open("wb") as file:
        file.truncate(num << 22)
    [file] = list_inputs([str(path)])
    numbers = np.arange(num)
    each = np.full(num, 4 << 20)
    pieces = np.stack([numbers, numbers + 1, each * 0 + 1000, each, each], 1)
    opened_path = tmp_path / "tables"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "count_file", lambda *_, **__: pieces)
        opened(path, tmp_path)
    begin = time.process_time()
    opened(path, tmp_path)
    took = time.process_time() - begin
    tracemalloc.start()
    table = opened(path, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert opened_path.exists()
    assert table.cut.rows.sum() == num * 1000
    assert peak < 100 << 20
    assert took < 1


@pytest.mark.usefixtures("small")
def test_what_cannot_be_cut_is_refused_with_a_way_out(tmp_path):
    path = write_rows(tmp_path / "a.jsonl.zst", ["a" * 1000] * 100)
    with pytest.raises(
        DataError, match=r"decompress it, or write it as several files or as Parquet"
    ):
        opened(path, tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    with pytest.raises(DataError, match="0 rows"):
        opened(empty, tmp_path)
    with pytest.raises(ConfigError, match="make a list of a generator"):
        opened(iter(["a"]), tmp_path)
    with pytest.raises(ConfigError, match="not a list"):
        opened({"train": [1]}, tmp_path)


def test_repeated_texts_of_parquet_are_cut_by_what_they_decode_to(tmp_path):
    texts = [f"{number % 10} " * 2000 for number in range(5000)]  # 20 MB, in 50 kB of Parquet
    table = opened(write_rows(tmp_path / "a.parquet", texts, 5000), tmp_path)
    assert max(table.cut.text) < 2 * units.SHARD_BYTES
    assert rows_of(table, tmp_path)[0] == texts
    [decoded] = tmp_path.glob("decoded-*")
    assert pa.ipc.open_file(decoded).num_record_batches >= len(table)


WORDS = pa.dictionary(pa.int8(), pa.string())
IN_DICTIONARIES: dict[str, tuple[pa.DataType, Any]] = {
    "structs": (pa.struct([("role", WORDS), ("n", pa.int8())]), lambda w: {"role": w, "n": 1}),
    "lists": (pa.list_(WORDS), lambda w: [w, None]),
    "large lists": (pa.large_list(pa.struct([("role", WORDS)])), lambda w: [{"role": w}, None]),
    "fixed lists": (pa.list_(WORDS, 2), lambda w: [w, "b"]),
    "list views": (pa.list_view(WORDS), lambda w: [w, None]),
    "large list views": (
        pa.large_list_view(pa.struct([("role", pa.list_view(WORDS))])),
        lambda w: [{"role": [w, "b"]}, None],
    ),
    "maps": (pa.map_(pa.string(), WORDS), lambda w: [("key", w)]),
    "lists in lists": (
        pa.list_(pa.struct([("turns", pa.list_(pa.struct([("role", WORDS)])))])),
        lambda w: [{"turns": [{"role": w}]}, {"turns": None}],
    ),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", IN_DICTIONARIES)
@pytest.mark.usefixtures("small")
def test_dictionaries_within_columns_are_read_from_units_of_several_shards(kind, suffix, tmp_path):
    type_, value = IN_DICTIONARIES[kind]
    # The words differ between row groups, and a group has several shards.
    rows = [None if n % 5 == 4 else value(f"{n // 150}.{n % 30}") for n in range(450)]
    columns = {"x": pa.array(rows, type_), "pad": [f"{n:0200}" for n in range(450)]}
    path = write_table(tmp_path / f"a.{suffix}", pa.table(columns), 150)
    everything = RowSelection("row", "")
    table = opened(path, tmp_path, everything)
    values, bad = rows_of(table, tmp_path, everything)
    assert not bad
    assert [row["x"] for row in values] == columns["x"].to_pylist()
    assert suffix == "arrow" or (len(table) > 10 and set(table.cut.decoded) != {0})


@pytest.mark.usefixtures("small")
def test_a_file_of_arrow_that_pyarrow_wrote_before_0_15_is_cut_and_read(tmp_path):
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    rows = pa.table({"text": TEXTS * 9})
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema, options=options) as writer:
        writer.write_table(rows, 50)
    table = opened(tmp_path / "a.arrow", tmp_path)
    assert len(table) > 4
    assert rows_of(table, tmp_path) == (TEXTS * 9, [])


TWICE = pa.table([["a", "b"], ["c", "d"], ["e", "f"]], ["text", "x", "text"])
REPEATED: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda path: write_table(path / "a.parquet", TWICE, 1),
    "arrow": lambda path: write_table(path / "a.arrow", TWICE, 1),
    "pyarrow": lambda _: TWICE,
    "pandas": lambda _: pd.DataFrame([["a", "c", "e"]], columns=TWICE.column_names),
    "csv": lambda path: comma_separated(path / "a.csv", [TWICE.column_names, ["a", "c", "e"]]),
}


def comma_separated(path: Path, rows: list[list[str]]) -> Path:
    path.write_text(csv_text(rows).decode())
    return path


@pytest.mark.parametrize("kind", REPEATED)
def test_a_column_that_is_there_twice_is_refused_unless_another_is_wanted(kind, tmp_path):
    rows, problem = REPEATED[kind](tmp_path), "has 2 columns 'text'; rename all but one of them"
    for wanted in (TEXT, RowSelection("text", "x", ("text",)), RowSelection("row", "")):
        if kind == "pandas":
            with pytest.raises(DataError, match=f"rows: {problem}"):
                opened(rows, tmp_path, wanted)
            continue
        values, bad = rows_of(opened(rows, tmp_path, wanted), tmp_path, wanted)
        assert not any(values)
        assert bad[0][1] == 0
        assert problem in bad[0][2]
    other = RowSelection("text", "x")
    assert rows_of(opened(rows, tmp_path, other), tmp_path, other)[0][0] == "c"


def test_columns_of_csv_without_a_name_may_be_several(tmp_path):
    path = comma_separated(tmp_path / "a.csv", [["text", "", ""], ["a", "", "x"]])
    row = RowSelection("row", "")
    assert rows_of(opened(path, tmp_path, row), tmp_path, row)[0] == [{"text": "a", "": "x"}]


@pytest.mark.usefixtures("small")
def test_the_text_of_dictionaries_is_what_they_decode_to(tmp_path):
    texts = [f"{number % 3} " * 500 for number in range(5000)]
    column = pa.array(texts).dictionary_encode()
    path = write_table(tmp_path / "a.parquet", pa.table({"text": column}), 5000)
    size = int(opened(path, tmp_path).cut.text.sum())
    assert size == pytest.approx(sum(map(len, texts)), rel=0.1)


def test_a_parquet_column_with_a_dot_in_its_name_has_the_size_of_any_other(tmp_path):
    sizes = []
    for name in ("text", "a.b"):
        pa.parquet.write_table(pa.table({name: TEXTS}), tmp_path / f"{name}.parquet")
        table = opened(tmp_path / f"{name}.parquet", tmp_path, RowSelection("text", name))
        sizes.append(int(table.cut.text.sum()))
    assert sizes[0] == sizes[1] >= sum(map(len, TEXTS)) / 2


@pytest.mark.parametrize("make", [list, pa.table, pd.DataFrame, datasets.Dataset.from_dict])
def test_no_rows_in_memory_are_refused_by_what_they_are(make, tmp_path):
    rows = make({} if make is list else {"text": []})
    with pytest.raises(DataError, match=r"rows=.*: 0 rows; pass some, or omit the source"):
        opened(rows, tmp_path)


@pytest.mark.usefixtures("small")
def test_a_file_that_changes_between_the_table_and_the_read_is_refused(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ["a" * 100] * 1000)
    table = opened(path, tmp_path)
    os.utime(path, (1, 1))
    with pytest.raises(DataError, match="changed since it was listed"):
        rows_of(table, tmp_path)


def test_a_shard_of_mds_with_other_bytes_is_refused(tmp_path):
    folder = write_mds(tmp_path / "mds", hashes=["xxh64"])
    table = opened(folder, tmp_path)
    path = folder / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"its xxh64 is .* but index.json says"):
        rows_of(table, tmp_path)


@pytest.mark.parametrize("kind", ["mds", "litdata", "litdata zstd"])
def test_shards_without_hashes_that_are_written_again_with_as_many_bytes_are_refused(
    kind, tmp_path
):
    folder = INPUTS[kind](tmp_path)
    table = opened(folder, tmp_path)
    assert rows_of(table, tmp_path)
    time.sleep(0.02)  # clocks of file systems are coarse
    shutil.rmtree(folder)
    INPUTS[kind](tmp_path)
    with pytest.raises(DataError, match=r"its index.json has changed since it was listed"):
        rows_of(table, tmp_path)
    assert rows_of(opened(folder, tmp_path), tmp_path)


def test_a_shard_of_mds_that_unpacks_to_more_than_is_stated_is_not_unpacked_further(tmp_path):
    folder = write_mds(tmp_path / "mds", compression="zstd")
    path = folder / "shard.00000.mds.zstd"
    index, bomb = (
        json.loads((folder / "index.json").read_text()),
        zstandard.compress(bytes(1 << 28)),
    )
    index["shards"][0]["zip_data"]["bytes"] = len(bomb)
    (folder / "index.json").write_text(json.dumps(index))
    path.write_bytes(bomb)
    table = opened(folder, tmp_path)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"does not decompress to the \d+ bytes"):
        rows_of(table, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_lines_of_a_store_are_counted_by_a_command_and_else_refused(tmp_path, memory, capsys):
    url = f"{memory}/rows.jsonl"
    with pytest.raises(ConfigError, match=f"streampack index {url} --out FOLDER"):
        opened(url, tmp_path)
    run_index(Index(paths=[url], out=tmp_path / "index"))
    assert capsys.readouterr().out == f"{url}: {len(TEXTS)} rows\n"
    table = opened(url, tmp_path, index=str(tmp_path / "index"))
    assert rows_of(table, tmp_path)[0] == TEXTS
    assert rows_of(opened(f"{memory}/rows.parquet", tmp_path), tmp_path)[0] == TEXTS
    with pytest.raises(ConfigError, match=r"has no rows.npz"):
        opened(url, tmp_path, index=str(tmp_path))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "file.arrow", "mds", "lit"])
@pytest.mark.usefixtures("small")
def test_tables_of_a_store_need_no_command(name, tmp_path, memory):
    assert rows_of(opened(f"{memory}/{name}", tmp_path), tmp_path)[0] == TEXTS


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """The inputs in fsspec's memory, which stands for any store."""
    folder = tmp_path_factory.mktemp("store")
    for name in ("rows.jsonl", "rows.parquet", "a.parquet", "a.arrow"):
        write_rows(folder / name, TEXTS, 20)
    arrow_file(folder / "file.arrow")
    write_mds(folder / "mds", compression="gz", hashes=["sha1"])
    write_litdata(folder / "lit")
    url = f"memory://{uuid4().hex}"
    files = fsspec.filesystem("memory")
    files.put(f"{folder}/", f"{url}/", recursive=True)
    yield url
    files.rm(url, recursive=True)


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def test_processes_of_a_node_count_a_file_once(tmp_path, monkeypatch):
    reads = Reads(monkeypatch)
    path = write_rows(tmp_path / "a.jsonl", ["a" * 100] * 1000)
    with ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(lambda _: opened(path, tmp_path).digest(), range(4)))
    assert len(digests) == 1
    assert reads.num_bytes == path.stat().st_size


def test_small_objects_of_a_store_share_shards(tmp_path):
    url = f"memory://{uuid4().hex}"
    for number in range(20):
        fsspec.filesystem("memory").pipe(f"{url}/{number:02}.txt", b"%d" % number)
    table = opened(url, tmp_path)
    assert (len(table), len(table.shard(0).units)) == (1, 20)
    assert rows_of(table, tmp_path)[0] == list(map(str, range(20)))


def test_shards_that_an_index_names_are_not_looked_up_one_by_one(tmp_path, monkeypatch):
    folder = write_mds(tmp_path / "mds")
    monkeypatch.delattr(sources, "_found")
    assert sum(opened(folder, tmp_path).cut.rows) == len(TEXTS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "mds", "lit"])
def test_what_several_shards_of_a_store_share_is_read_once(name, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", KB)
    (tmp_path / "in").mkdir()
    if name in ("mds", "lit"):
        (write_mds if name == "mds" else write_litdata)(tmp_path / "in" / name)
    else:
        write_rows(tmp_path / "in" / name, TEXTS, 150)
    url, files = f"memory://{uuid4().hex}", fsspec.filesystem("memory")
    files.put(f"{tmp_path}/in/", f"{url}/", recursive=True)
    table = opened_with_index(f"{url}/{name}", tmp_path)
    read, original = [], DriverStore.read

    def counted(*args: Any, **options: Any) -> bytes:
        data = original(*args, **options)
        read.append(len(data))
        return data

    monkeypatch.setattr(DriverStore, "read", counted)
    assert rows_of(table, tmp_path)[0] == TEXTS
    sizes = [file.num_bytes for file in table.cut.units.files]
    assert len(table) > len(sizes)
    # Of a small table, each of the two row groups is read with the footer, and all between.
    most = 4 if name == "a.parquet" else 1
    assert sum(sizes) <= sum(read) <= most * sum(sizes)
