"""However damaged the table of a token file is, a stream never reads outside of the file."""

from __future__ import annotations

import gzip
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import Stream, TokenFiles
from streampack.errors import DataError, StreampackError
from streampack.flat.token_file import Ends, TokenFile, bisect
from streampack.streams import open_stream
from tests.helpers.flat import (
    damage,
    make_documents,
    source_of,
    write,
    write_litdata,
    write_olmo,
)

TABLES = {
    "megatron": "web.idx",
    "datatrove": "web.ds.index",
    "olmo": "web.csv.gz",
    "arrow": "web.arrow",
    "litdata": "chunk-0-0.bin",
}
NUM_DAMAGES, NUM_DAMAGES_SLOW = 400, 245_000  # of each format; an index has more in test_index
MAX_BYTES = 256 << 20


def read_all(folder: Path, form: str) -> None:
    """Open a stream and read every token that its tables refer to."""
    stream = open_stream(Stream(source_of(form, folder, format=form)), 0)
    for shard in range(stream.num_shards):
        opened = stream.open_shard(shard)
        spans = opened.tokens
        assert (spans.counts >= 0).all()
        ends = spans.begins + spans.counts * np.dtype(spans.dtype).itemsize
        assert ((spans.begins >= 0) & (ends <= len(opened.data))).all()


def fuzz(form: str, folder: Path, num_damages: int) -> None:
    write(form, folder, make_documents(30))
    table = folder / TABLES[form]
    whole = table.read_bytes()
    rng = np.random.default_rng(num_damages)
    num_refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(num_damages // (10 if form == "arrow" else 1)):
        if form == "olmo":
            table.write_bytes(gzip.compress(damage(gzip.decompress(whole), rng), 1))
        else:
            table.write_bytes(damage(whole, rng))
        try:
            read_all(folder, form)
        except StreampackError:
            num_refused += 1
    assert num_refused > num_damages // 10 or form == "arrow"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MAX_BYTES


@pytest.mark.parametrize("form", TABLES)
def test_a_damaged_table_is_a_typed_error_or_stays_inside_the_file(form, tmp_path):
    fuzz(form, tmp_path, NUM_DAMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("form", TABLES)
def test_a_million_damaged_tables_are_typed_errors_or_stay_inside_the_file(form, tmp_path):
    fuzz(form, tmp_path, NUM_DAMAGES_SLOW)


@pytest.mark.parametrize("form", ["megatron", "datatrove", "olmo"])
def test_a_missing_table_is_named(form, tmp_path):
    write(form, tmp_path, make_documents(30))
    (tmp_path / TABLES[form]).unlink()
    with pytest.raises(DataError, match=r"web\.(idx|ds\.index|csv\.gz)"):
        open_stream(Stream(source_of(form, tmp_path)), 0)


def test_tokens_after_olmos_last_document_are_not_read(tmp_path):
    documents = make_documents(20)
    write_olmo(tmp_path, documents)
    stream = open_stream(Stream(TokenFiles(tmp_path, dtype="uint16")), 0)
    assert stream.total_tokens() == sum(map(len, documents))


def test_litdatas_chunk_of_another_index_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_litdata(tmp_path / "a", make_documents(20))
    write_litdata(tmp_path / "b", make_documents(21))
    (tmp_path / "b" / "index.json").write_bytes((tmp_path / "a" / "index.json").read_bytes())
    with pytest.raises(DataError, match=r"chunk-0-0\.bin"):
        read_all(tmp_path / "b", "litdata")


@settings(deadline=None)
@given(st.lists(st.integers(0, 90_000_000), min_size=1, max_size=30), st.data())
def test_virtual_shards_are_the_documents_that_begin_in_each_cell(lengths, data):
    ends = np.cumsum(np.array(lengths, np.int64))
    file = TokenFile(name="x", dtype="uint16", num_bytes=int(2 * ends[-1]), boundaries=Ends(ends))
    first = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(first + 1, len(lengths)))
    shards = file.cut(first, stop)
    begins = ends - np.array(lengths)
    cells = begins[first:stop] // (32 << 20)
    borders = np.flatnonzero(np.diff(cells)) + 1 + first
    firsts, stops = shards.first_document, first + shards.first_sample[1:]
    assert firsts.tolist() == [first, *borders.tolist()]
    assert stops[-1] == stop
    assert (shards.extents[:, 0] == 2 * begins[firsts]).all()
    assert (shards.extents[:, 1] == 2 * ends[stops - 1]).all()


@pytest.mark.parametrize("num_targets", [1, 5, 100])
def test_a_search_asks_for_few_entries_at_a_time(num_targets):
    asked = []

    def value_of(places):
        asked.append(len(places))
        return places * 3

    count = 100_000
    targets = np.linspace(1, 3 * count - 3, num_targets).astype("int64")
    np.testing.assert_array_equal(bisect(value_of, count, targets), -(-targets // 3))
    assert max(asked) <= max(256, 8 * num_targets)
    assert len(asked) <= 8
