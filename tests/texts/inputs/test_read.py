"""Rows of each format: their values, and bad rows, which do not affect their neighbours."""

from __future__ import annotations

import datetime
import json
import re
import sys
import tracemalloc
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import ConfigError, DataError
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.values import RowSelection
from tests.helpers.examples import examples
from tests.helpers.inputs import (
    TEXT,
    packed,
    rows_of,
    split,
    texts_of,
    write_rows,
    write_table,
)

TOKENS = RowSelection("tokens", "tokens")
CHAT = RowSelection("chat", "messages")
HI = [{"role": "user", "content": "Hi"}]
GOOD = b'{"text": "good", "url": "u"}'
BAD_LINES = {
    b'{"text": "a"': "not valid JSON",
    b'{"text": "a"} x': "not valid JSON",
    b'{"text": "\xff"}': "not valid JSON",
    b'{"text": "good", "other": "\xff", "url": 1}': "not valid JSON",
    b'{"text": "\\ud800"}': "not valid JSON",
    b'{"content": "a"}': "no column 'text'; it has 'content'.*set text= to one of them",
    b'{"tex": "a"}': "did you mean 'tex'",
    b'{"text": 1}': "column 'text' is of type int, but must be text",
    b'{"text": null}': "column 'text' is null, but must be text",
    b'{"text": [1, 2]}': "omit tokenizer=",
    b'"text"': "str, but a row must be a JSON object",
    b"[1, 2]": "list, but a row must be a JSON object",
    b"[" * 100_000: "not valid JSON",
    b"\x00": "not valid JSON",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("read")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_batches_say_how_much_of_their_slice_was_read(tmp_path, suffix):
    rng = np.random.default_rng(0)
    lines = [b'{"text": "%s"}' % rng.bytes(1500).hex().encode() for _ in range(2780)]
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(packed(b"\n".join(lines), path.suffix))
    for part in split(path, part_bytes=1 << 22):
        read = [batch.num_bytes for batch in read_rows(part, TEXT)]
        assert read == sorted(read)
        assert len(set(read)) > 2
        assert read[-1] == part.num_bytes


def test_a_long_first_line_is_not_held_while_later_ones_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = ["x" * 10_000_000, *["y" * 1000] * 10_000]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    [part] = split(path)
    tracemalloc.start()
    try:
        held = [tracemalloc.get_traced_memory()[0] for _ in read_rows(part, TEXT, batch_rows=100)]
    finally:
        tracemalloc.stop()
    assert len(held) > 50
    assert max(held[20:]) < 8_000_000


@given(
    lines=st.lists(st.sampled_from([GOOD, b"", b" \r", *BAD_LINES]), max_size=30),
    part_bytes=st.integers(1, 200),
    batch_rows=st.integers(1, 8),
)
def test_good_and_bad_rows_together_are_all_rows(folder, lines, part_bytes, batch_rows):
    path = folder / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines))
    selection = RowSelection("text", "text", keep=("url",))

    rows, bad = rows_of(split(path, part_bytes), selection, batch_rows)

    assert [value for _, value in rows] == ["good"] * lines.count(GOOD)
    assert len(bad) == sum(line in BAD_LINES for line in lines)
    for each in bad:  # the offset is that in the file, independent of the slice
        begin = int(each.reason.rpartition("byte ")[2].rstrip(")"))
        line = path.read_bytes()[begin:].split(b"\n")[0]
        assert re.search(BAD_LINES[line], each.reason)


def test_numbers_that_python_writes_but_json_has_not_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n')

    [batch] = read_rows(split(path)[0], RowSelection("text", "text", keep=("score",)))

    assert batch.values == ["a", "b"]
    assert np.isnan(batch.kept["score"][0])
    assert batch.kept["score"][1] == -np.inf


def test_kept_values_stay_beside_their_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = ['{"text": "a", "url": "1"}', '{"text": "b"}', '{"text": "c", "url": null}']
    path.write_text("\n".join(lines))

    [batch] = read_rows(split(path)[0], RowSelection("text", "text", keep=("url",)))

    assert (batch.values, batch.kept) == (["a", "c"], {"url": ["1", None]})
    way_out = "set columns=, labels= or loss_mask= to one of them"  # of write, and of TokenFiles
    assert f"no column 'url'; it has 'text'; {way_out}" in batch.bad[0].reason


@pytest.mark.parametrize("ids", [[], [1, 2], [True, False], [2**40]])
def test_token_ids_are_integer_arrays(tmp_path, ids):
    path = tmp_path / "rows.jsonl"
    rows = [{"tokens": ids}, {"input_ids": ids}, ids, {"tokens": json.dumps([int(i) for i in ids])}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    found, bad = rows_of(split(path), TOKENS)

    assert bad == []
    assert len(found) == 4
    for _, tokens in found:
        assert tokens.dtype.kind == "i"
        assert tokens.tolist() == ids


@pytest.mark.parametrize(
    "value", ["text", '"[1, x]"', [1.5], ["1"], [[1]], [[1], [1, 2]], [None], 7, None, {"a": 1}]
)
def test_other_values_are_not_token_ids(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps({'tokens': value})}\n[1]\n")

    rows, [bad] = rows_of(split(path), TOKENS)

    assert [tokens.tolist() for _, tokens in rows] == [[1]]
    assert "column 'tokens'" in bad.reason


@pytest.mark.parametrize("suffix", ["txt", "md", "txt.gz", "md.zst"])
def test_a_text_file_is_one_row(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    text = "# Title\r\n\n  日本 \n"
    path.write_bytes(packed(b"\xef\xbb\xbf" + text.encode(), path.suffix))

    assert rows_of(split(path, 1)) == ([(0, text)], [])


def test_a_text_file_that_is_not_text_is_a_bad_row(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")

    rows, [bad] = rows_of(split(path))
    assert (rows, bad.row) == ([], 0)
    assert "byte 3 is not valid UTF-8" in bad.reason
    for selection, text in (
        (TOKENS, "no column 'tokens'; omit columns="),
        (RowSelection("text", "t", keep=("u",)), "no column"),
    ):
        _, [bad] = rows_of(split(path), selection)
        assert text in bad.reason


@pytest.mark.parametrize("start", ['[{"text": "a"}, {"text": "b"}]', '[\n  {"text": "a"},\n'])
def test_a_json_array_is_refused_with_the_command_that_makes_lines(tmp_path, start):
    path = tmp_path / "rows.json"
    path.write_text(start)

    with pytest.raises(DataError, match=r"one JSON array.*datasets\.Dataset\.from_json"):
        rows_of(split(path))


CSV_HEAD = b"id,text\n"


def test_csv_rows_may_span_lines_and_lack_a_last_line_end(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"a ""b""\r\nc, d"\r\n\r\n2,e')

    rows, bad = rows_of(split(path))

    assert (rows, bad) == ([(0, 'a "b"\r\nc, d'), (1, "e")], [])


def test_tsv_is_split_at_tabs(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("id\ttext\n1\ta, b\n")

    assert texts_of(split(path)) == ["a, b"]


GOOD_RECORDS = {
    b"1,plain": "plain",
    b'2,"quoted, x"': "quoted, x",
    b'3,"two\nlines"': "two\nlines",
    b'4,"a ""b"""': 'a "b"',
}
BAD_RECORDS = [b"8", b"7,a,b", b"5,\xff"]


@given(
    lines=st.lists(st.sampled_from([*GOOD_RECORDS, *BAD_RECORDS]), max_size=30),
    batch_rows=st.integers(1, 8),
)
def test_bad_lines_of_csv_take_none_of_their_neighbours(folder, lines, batch_rows):
    path = folder / "mixed.csv"
    path.write_bytes(CSV_HEAD + b"".join(line + b"\n" for line in lines))

    rows, bad = rows_of(split(path), batch_rows=batch_rows)

    assert [text for _, text in rows] == [
        GOOD_RECORDS[line] for line in lines if line in GOOD_RECORDS
    ]
    assert len(bad) == sum(line in BAD_RECORDS for line in lines)
    numbers = sorted([row for row, _ in rows] + [each.row for each in bad])
    assert numbers == list(range(len(lines)))


BROKEN_RECORDS = {
    b'9,"open\n': r"the row from line 5 on is not valid CSV \(.*\); fix its quotes",
    b'6,"a"b\n': r"the row from line 5 on is not valid CSV \(.*\); fix its quotes",
    b'5,"a\nb",c\n': "lines 5 to 6 are one row of 3 values, but there are 2 columns; fix its quo",
}


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("broken", BROKEN_RECORDS)
def test_a_broken_row_of_csv_is_an_error_with_file_and_line(tmp_path, broken, suffix):
    path = tmp_path / f"rows{suffix}"
    data = CSV_HEAD + b'1,"a\nb"\n2,good\n' + broken + b'3,"good"\n'
    path.write_bytes(packed(data, path.suffix))

    with pytest.raises(DataError, match=f"^{path}: {BROKEN_RECORDS[broken]}"):
        rows_of(split(path))
    [batch, rest] = read_rows(split(path)[0], TEXT, skips_damage=True)

    assert batch.values == ["a\nb", "good"]
    assert (rest.values, rest.bad[0].row) == ([], 2)
    assert re.search(
        f"the rest of the file is omitted: {BROKEN_RECORDS[broken]}", rest.bad[0].reason
    )


def test_a_quote_that_is_never_closed_is_noticed_within_16_mebibytes(tmp_path):
    path = tmp_path / "rows.csv"
    good = b"1,good text of some length\n" * 1_500_000
    path.write_bytes(CSV_HEAD + b'0,"open\n' + good)

    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"line 2 on is not valid CSV \(field larger than"):
            rows_of(split(path))
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


def test_csv_values_are_text_tokens_are_json(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('tokens,n\n"[1, 2]",007\n')

    [batch] = read_rows(split(path)[0], RowSelection("tokens", "tokens", keep=("n",)))

    assert batch.values[0].tolist() == [1, 2]
    assert batch.kept == {"n": ["007"]}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 2)]
)
def test_token_lists_of_tables_are_arrays_of_their_type(tmp_path, suffix, kind):
    ids = [[1, 2], None, [3, 4], [5, 6], [7, 8]]
    table = pa.table({"input_ids": pa.array(ids, kind)})
    path = write_table(tmp_path / f"rows.{suffix}", table, 3)

    rows, [bad] = rows_of(split(path, 1), TOKENS, batch_rows=2)

    assert [(row, tokens.tolist()) for row, tokens in rows] == [
        (row, each) for row, each in enumerate(ids) if each
    ]
    assert {tokens.dtype for _, tokens in rows} == {np.dtype(kind.value_type.to_pandas_dtype())}
    assert bad.row == 1


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([1, 2, 3]), "column 'text' is of type int, but must be text"),
        (pa.array([["a"], ["b"], ["c"]]), "column 'text' is a list"),
        (None, "no column 'text'; it has 'id'"),
    ],
)
def test_a_column_of_another_type_makes_each_row_bad(tmp_path, suffix, column, reason):
    columns = {"id": pa.array([1, 2, 3])} | ({} if column is None else {"text": column})
    path = write_table(tmp_path / f"rows.{suffix}", pa.table(columns), 2)

    rows, bad = rows_of(split(path, 1))

    assert rows == []
    assert [each.row for each in bad] == [0, 1, 2]
    assert all(reason in each.reason for each in bad)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_value_that_is_not_utf8_or_null_makes_its_row_bad(tmp_path, suffix, is_kept):
    raw = pa.array([b"a", b"\xff", None, b"d"], pa.binary())
    wrong = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    names = ("text", "url") if is_kept else ("url", "text")
    table = pa.table(dict(zip(names, (pa.array(["1", "2", "3", "4"]), wrong), strict=True)))
    path = write_table(tmp_path / f"rows.{suffix}", table, 3)

    rows, bad = rows_of(split(path), RowSelection("text", "text", keep=("url",)))

    assert [row for row, _ in rows] == ([0, 2, 3] if is_kept else [0, 3])
    assert [each.row for each in bad] == ([1] if is_kept else [1, 2])
    assert f"column {names[1]!r} is not valid UTF-8" in bad[0].reason


def test_null_inside_a_list_of_tokens_makes_its_row_bad(tmp_path):
    table = pa.table({"tokens": pa.array([[1, 2], [3, None], [4]], pa.list_(pa.int32()))})

    rows, [bad] = rows_of(split(write_table(tmp_path / "a.parquet", table, 9)), TOKENS)

    assert [(row, tokens.tolist()) for row, tokens in rows] == [(0, [1, 2]), (2, [4])]
    assert (bad.row, "column 'tokens'" in bad.reason) == (1, True)


def test_conversations_have_columns_by_any_name_or_layout(tmp_path):
    table = pa.table(
        {
            "chat": [HI],
            "messages": [HI * 2],
            "prompt": ["a"],
            "completion": ["b"],
            "system": ["c"],
            "history": ["d"],
            "picture": [b"e"],
        }
    )

    def value(chat, *dropped):
        path = write_table(tmp_path / "a.parquet", table.drop_columns(dropped), 9)
        [(_, value)], [] = rows_of(split(path), RowSelection("chat", chat))
        return value

    extra = {"system": "c", "history": "d"}
    pair = {"prompt": "a", "completion": "b", **extra}
    assert value("messages") == {"messages": HI * 2, **pair}
    assert value("chat") == {"messages": HI, **pair}
    assert value("prompt") == pair
    assert value("messages", "messages", "chat") == pair
    _, [bad] = rows_of(
        split(write_table(tmp_path / "b.parquet", pa.table({"prompt": ["a"]}), 9)), CHAT
    )
    assert "no column 'messages'; it has 'prompt'" in bad.reason


def test_kept_columns_of_tables_are_plain_values(tmp_path):
    day = datetime.date(2024, 1, 2)
    table = pa.table({"text": ["a"], "day": [day], "price": [Decimal("1.50")], "mask": [[1, 0]]})
    selection = RowSelection("text", "text", keep=("day", "price", "mask"))

    [batch] = read_rows(split(write_table(tmp_path / "a.parquet", table, 9))[0], selection)

    assert batch.kept["day"] == ["2024-01-02"]
    assert batch.kept["price"] == ["1.50"]
    assert batch.kept["mask"][0].tolist() == [1, 0]


def test_a_damaged_row_group_is_an_error_that_names_its_byte(tmp_path):
    texts = [f"{n:0200}" for n in range(1000)]
    path = write_table(tmp_path / "a.parquet", pa.table({"text": texts}), 100)
    group = pa.parquet.read_metadata(path).row_group(4).column(0)
    begin = group.dictionary_page_offset or group.data_page_offset
    data = bytearray(path.read_bytes())
    data[begin : begin + 500] = b"\xff" * 500
    path.write_bytes(data)

    with pytest.raises(DataError, match=rf"{path}: row group 4 cannot be read, from byte {begin}"):
        rows_of(split(path))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@given(lengths=st.lists(st.sampled_from([1, 1000, 3_000_000, 9_000_000]), max_size=12))
@examples(6, many=10)
def test_batches_of_tables_have_eight_mebibytes_or_one_row(folder, suffix, lengths):
    texts = ["x" * length for length in lengths]
    part = split(write_rows(folder / f"long.{suffix}", texts, 5))[0]

    batches = list(read_rows(part, TEXT, batch_rows=4))

    assert [text for batch in batches for text in batch.values] == texts
    assert all(len(b.rows) == 1 or sum(map(len, b.values)) <= 8 << 20 for b in batches)


def test_without_pyarrow_tables_are_refused_with_the_extra(tmp_path, monkeypatch):
    [part] = split(write_table(tmp_path / "a.parquet", pa.table({"text": ["a"]}), 9))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    with pytest.raises(ConfigError, match=r"pip install 'streampack\[tables\]'"):
        rows_of([part])


@pytest.mark.parametrize(
    ("suffix", "sizes"), [("jsonl", [1] * 9), ("parquet", [2] * 4 + [1]), ("arrow", [2] * 4 + [1])]
)
def test_a_batch_of_long_rows_ends_before_its_count(tmp_path, suffix, sizes):
    texts = [f"{number}" * 3_000_000 for number in range(9)]
    part = split(write_rows(tmp_path / f"a.{suffix}", texts, 9))[0]

    batches = list(read_rows(part, TEXT))

    assert [text for batch in batches for text in batch.values] == texts
    assert [row for batch in batches for row in batch.rows] == list(range(9))
    assert sorted(len(batch.values) for batch in batches) == sorted(sizes)
