"""A transform sees whole rows, and changes, omits or refuses each of them alone."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest

from streampack.errors import ConfigError
from streampack.texts import units
from streampack.texts.inputs.values import RowSelection
from streampack.texts.table import decode_unit, open_table, read_shard
from streampack.texts.transform import Transform
from tests.helpers.inputs import TEXT, write_rows, write_table

HERE = __name__


def clean(row):
    if row["lang"] != "en":
        return None
    if row["body"] == "stop":
        raise KeyError("stop")
    return {"text": row["body"].upper()} if row["body"] != "odd" else [row["body"]]


def titled(row):
    return {**row, "text": f"{row['text']}!"} if row["text"] else None


ROWS = [
    {"body": "one", "lang": "en"},
    {"body": "zwei", "lang": "de"},
    {"body": "stop", "lang": "en"},
    {"body": "odd", "lang": "en"},
    {"body": "two", "lang": "en"},
]


def read(source, tmp_path, transform, selection=TEXT):
    table = open_table(source, selection, tmp_path, transform=transform)
    rows, bad = {}, []
    for number in range(len(table)):
        shard, decoded = table.shard(number), None
        if shard.decoded_bytes:
            decoded = tmp_path / "decoded"
            decode_unit(shard, RowSelection("row", "text"), decoded)
        for batch in read_shard(shard, selection, transform, decoded=decoded):
            numbers = [row + int(table.first_sample[number]) for row in batch.rows]
            rows |= dict(zip(numbers, batch.values, strict=True))
            bad += [(each.row, each.reason) for each in batch.bad]
    return rows, bad


@pytest.mark.parametrize("kind", ["list", "arrow", "parquet", "large"])
def test_each_row_is_seen_whole_and_by_itself(kind, tmp_path, monkeypatch):
    source = ROWS
    if kind != "list":
        suffix = "parquet" if kind == "large" else kind
        source = write_table(tmp_path / f"a.{suffix}", pa.Table.from_pylist(ROWS), 2)
    if kind == "large":
        monkeypatch.setattr(units, "SHARD_BYTES", 64)
        monkeypatch.setattr(units, "UNIT_BYTES", 64)
    rows, bad = read(source, tmp_path, Transform.of(f"{HERE}:clean"))
    assert rows == {0: "ONE", 4: "TWO"}
    assert [row for row, _ in bad] == [2, 3]
    assert f"transform='{HERE}:clean' raised KeyError: 'stop'" in bad[0][1]
    assert "returned <list>, not a row or None" in bad[1][1]


def test_a_text_file_is_a_row_with_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("")
    rows, bad = read(str(tmp_path / "*.txt"), tmp_path, Transform.of(titled))
    assert (rows, bad) == ({0: "one!"}, [])


def test_lines_and_bad_lines_keep_their_rows(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", ["one", "", "two"])
    path.write_bytes(b"\n{\n" + path.read_bytes())
    rows, bad = read(path, tmp_path, Transform.of(titled))
    assert rows == {2: "one!", 4: "two!"}
    assert [row for row, _ in bad] == [1]


def test_a_row_without_the_column_after_a_transform_is_bad(tmp_path):
    rows, bad = read(ROWS[:1], tmp_path, Transform.of("copy:copy"))
    assert rows == {}
    assert "after transform='copy:copy': no column 'text'" in bad[0][1]


def test_a_function_is_known_by_where_it_is_imported_from():
    made = Transform.of(clean, "2")
    assert (made.name, made.version) == (f"{HERE}:clean", "2")
    assert made.load() is clean


@pytest.mark.parametrize(
    "function", [lambda row: row, partial(clean), type("Local", (), {})().__init__, 5]
)
def test_what_other_processes_cannot_import_is_refused_with_a_way_out(function):
    with pytest.raises(ConfigError, match=r"transform='cleaning:\w+'"):
        Transform.of(function)


def test_a_function_of_the_main_script_is_refused(monkeypatch):
    monkeypatch.setattr(clean, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"pass transform='cleaning:clean'"):
        Transform.of(clean)


@pytest.mark.parametrize("name", ["nothing:here", "copy:nothing", "copy", "", "copy:copy:copy"])
def test_a_name_that_cannot_be_imported_is_refused(name):
    with pytest.raises(ConfigError, match="'module:function'"):
        Transform.of(name)
