"""The laws of splitting: slices give each row of a file once and in order, and never change."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import DataError
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.slices import InputSlice
from streampack.texts.units import uncounted_units
from tests.helpers.inputs import TEXT, jsonl, rows_of, split, texts_of, write_rows, write_table

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=30)
SUFFIXES = ("jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.zst", "parquet", "arrow")
BOM = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("split")


@given(texts=TEXTS, part_bytes=st.integers(1, 400), data=st.data())
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_slices_give_each_row_once_in_order(folder, suffix, texts, part_bytes, data):
    if suffix.startswith("csv"):
        texts = [f"x{text}".replace("\r", "") for text in texts]
    rows_per_piece = data.draw(st.integers(1, 5))
    path = write_rows(folder / f"rows.{suffix}", texts, rows_per_piece)

    parts = split(path, part_bytes)

    assert texts_of(parts) == texts
    assert parts == split(path, part_bytes)
    assert sum(part.num_bytes for part in parts) <= path.stat().st_size
    assert [InputSlice(**json.loads(json.dumps(asdict(part)))) for part in parts] == parts


@given(
    texts=TEXTS,
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\r\n"]), min_size=1),
    part_bytes=st.integers(1, 400),
    has_mark=st.booleans(),
    has_last_end=st.booleans(),
)
def test_line_ends_of_any_kind_split_alike(folder, texts, ends, part_bytes, has_mark, has_last_end):
    lines = [line for text in texts for line in (jsonl([text])[:-1], random.Random(7).choice(ends))]
    lines = [
        line if index % 2 == 0 else ends[index % len(ends)] for index, line in enumerate(lines)
    ]
    content = b"".join(lines) if has_last_end else b"".join(lines[:-1])
    path = folder / "ends.jsonl"
    path.write_bytes(BOM * has_mark + content)

    parts = split(path, part_bytes)

    assert texts_of(parts) == texts
    starts = [part.start for part in parts]
    stops = [part.stop for part in parts]
    if len(parts) > 1:
        assert starts == [0, *stops[:-1]]
        assert stops[-1] == path.stat().st_size
        assert [part.num_bytes for part in parts] == [
            stop - start for start, stop in zip(starts, stops, strict=True)
        ]


def test_a_slice_ends_with_the_line_at_each_multiple_of_part_bytes(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ["x" * 80] * 100)  # lines of 93 bytes

    ends = [part.stop for part in split(path, 200)]

    lines = [*range(93, 9300, 93), 9300]
    assert ends == sorted(
        {next(end for end in lines if end >= at) for at in range(200, 9300, 200)} | {9300}
    )


def test_lines_longer_than_part_bytes_get_slices_of_their_own(tmp_path):
    texts = ["é" * 200_000, "a", "日本" * 100_000, "b"]
    path = write_rows(tmp_path / "rows.jsonl", texts)

    parts = split(path, 1000)

    assert len(parts) == 3  # the short lines share a slice with the next ones
    assert texts_of(parts) == texts


def test_files_whose_text_is_small_beside_other_columns_are_not_cut(tmp_path):
    others = [random.Random(n).randbytes(2000) for n in range(9)]
    for number in range(6):
        table = pa.table({"text": [f"{number} {row}" for row in range(9)], "image": others})
        write_table(tmp_path / f"{number}.parquet", table, 2)

    parts = uncounted_units(list_inputs([str(tmp_path)]), TEXT, 1000)

    assert all(one.stop == -1 for part in parts for one in part)
    assert 1 < len(parts) < 6
    expected = [f"{number} {row}" for number in range(6) for row in range(9)]
    assert texts_of(one for part in parts for one in part) == expected


def test_a_table_without_rows_is_in_a_part(tmp_path):
    path = tmp_path / "rows.parquet"
    pa.parquet.ParquetWriter(path, pa.schema({"text": pa.string()})).close()  # no row group
    assert [(one.uri, one.stop) for one in split(path, 10)] == [(str(path), -1)]


def test_slices_of_tables_count_rows_in_the_file(tmp_path):
    path = write_rows(tmp_path / "rows.parquet", [f"text {n}" for n in range(20)])

    parts = split(path, 1)

    assert [(part.start, part.stop) for part in parts] == [(n, n + 1) for n in range(7)]
    assert [row for row, _ in rows_of(parts)[0]] == list(range(20))


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("has_dictionaries", [False, True])
def test_an_arrow_stream_or_file_is_one_slice(tmp_path, kind, has_dictionaries):
    texts = pa.array([f"text {n % 9}" for n in range(20)])
    table = pa.table({"text": texts.dictionary_encode() if has_dictionaries else texts})
    with getattr(pa.ipc, f"new_{kind}")(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table, 3)

    [part] = split(tmp_path / "rows.arrow", 1)

    assert (part.start, part.stop) == (0, -1)
    assert rows_of([part]) == (list(enumerate(texts.to_pylist())), [])


@pytest.mark.parametrize("change", ["content", "size", "time"])
def test_a_changed_file_gives_other_slices(tmp_path, change):
    path = write_rows(tmp_path / "rows.jsonl", ["a", "b"])
    before = split(path, 10)
    status = path.stat()

    if change == "content":
        write_rows(path, ["a", "c"])
    elif change == "size":
        write_rows(path, ["a", "bb"])
        os.utime(path, ns=(0, status.st_mtime_ns))
    if change != "size":
        os.utime(path, ns=(0, status.st_mtime_ns + 1))

    assert not set(before) & set(split(path, 10))
    with pytest.raises(DataError, match=rf"{path}: changed since it was listed"):
        rows_of(before)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "jsonl.zst", "parquet"])
def test_a_file_that_changes_under_its_reader_is_an_error(tmp_path, suffix):
    path = write_rows(tmp_path / f"rows.{suffix}", ["a text"] * 2000, 1000)
    [part] = split(path)
    batches = read_rows(part, TEXT)
    next(batches)
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    with pytest.raises(DataError, match=rf"{path}: changed since it was listed"):
        next(batches)


def test_a_file_that_is_replaced_under_its_reader_stays_as_it_was(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ["a text"] * 2000)
    [part] = split(path)
    batches = read_rows(part, TEXT)
    count = len(next(batches).values)
    write_rows(tmp_path / "other.jsonl", ["another"]).replace(path)

    assert count + sum(len(batch.values) for batch in batches) == 2000


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("part_bytes", [1000, 1 << 30])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_table_cut_short_is_an_error_that_names_the_byte(tmp_path, suffix, share, part_bytes):
    path = write_rows(tmp_path / f"rows.{suffix}", ["a text"] * 1000, 100)
    size = int((path.stat().st_size - 8) * share)  # 8: the mark of an Arrow stream's end
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(DataError, match=rf"{path}: .*byte {size}.*make a new copy"):
        rows_of(split(path, part_bytes))
