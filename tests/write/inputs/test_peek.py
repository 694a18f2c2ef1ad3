"""The first row of a file, and errors for files that have none to show."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from streampack.errors import DataError
from streampack.write.inputs.listing import list_inputs
from streampack.write.inputs.peek import first_row
from tests.helpers.inputs import write_table

TABLE = pa.table({"body": [f"{number:0100}" for number in range(100)], "ids": [[1, 2]] * 100})
FIRST = {"body": "0" * 100, "ids": [1, 2]}


def row_of(path):
    return first_row(list_inputs([str(path)])[0])


def arrow_file(path):
    """Write a file of Arrow IPC, with an index, not a stream."""
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 10)
    return path


def arrow_stream(path):
    return write_table(path, TABLE, 10)


@pytest.mark.parametrize("write", [arrow_file, arrow_stream])
def test_tables_show_their_first_row(tmp_path, write):
    assert row_of(write(tmp_path / "a.arrow")) == FIRST
    assert row_of(write_table(tmp_path / "a.parquet", TABLE, 10)) == FIRST


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_without_rows_has_no_first_row(tmp_path, suffix):
    assert row_of(write_table(tmp_path / f"a.{suffix}", TABLE.slice(0, 0), 10)) == {}


@pytest.mark.parametrize("write", [arrow_file, arrow_stream])
@pytest.mark.parametrize("num_bytes", [12, 300, 1500, -8])
def test_a_cut_arrow_file_is_an_error_that_names_it(tmp_path, write, num_bytes):
    path = write(tmp_path / "cut.arrow")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=rf"{path}: .* cut short or damaged"):
        row_of(path)


def test_a_damaged_parquet_page_is_an_error_that_names_its_file(tmp_path):
    path = write_table(tmp_path / "bad.parquet", TABLE, 10)
    data = bytearray(path.read_bytes())
    data[4:404] = b"\xff" * 400
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path}: its first row cannot be read .*damaged"):
        row_of(path)


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (b"body,n\na text,1\n", {"body": "a text", "n": "1"}),
        (b'\xef\xbb\xbfbody,n\r\n"a\ntext",1', {"body": "a\ntext", "n": "1"}),
        (b"body\n" + b"x" * 200_000, {"body": "x" * 200_000}),
        (b"body\n", {}),
        (b"", {}),
    ],
)
def test_the_first_row_of_csv_is_the_one_below_its_header(tmp_path, data, row):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    assert row_of(path) == row
