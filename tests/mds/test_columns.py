"""Columns in shards: correct spans are found, and impossible ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import streaming
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import DataError
from streampack.mds.columns import find_column, sample_spans
from streampack.mds.index import parse_index
from tests.helpers import builders
from tests.helpers.examples import examples
from tests.helpers.index_json import index_text


def layout_of(encoding: str, size: int | None = None) -> Any:
    text = index_text(
        column_names=["a", "tokens"],
        column_encodings=["str", encoding],
        column_sizes=[None, size],
        raw_data__bytes=100_000,
    )
    return parse_index(text, "x").shards[0].layout


@pytest.mark.parametrize(
    ("encoding", "size", "message"),
    [
        (
            "str",
            None,
            r"column 'tokens' is stored as 'str' \(column_encodings\), but tokens, labels",
        ),
        ("bytes", None, "stored as 'bytes', which state no dtype; write tokens='tokens:TYPE' with"),
        ("ndarray:float32", None, "has float32, but must have one of int8, int16"),
        ("ndarray:int32:4,x", None, r"'ndarray:int32:4,x' \(column_encodings\) has an invalid sh"),
        ("ndarray:int32:4", 8, r"has column_sizes 8, but must have 16; write index"),
        ("ndarray:int32", 8, "has column_sizes 8, but must have null, as its"),
    ],
)
def test_a_column_that_holds_no_integers_is_refused(encoding, size, message):
    with pytest.raises(DataError, match=message) as caught:
        find_column(layout_of(encoding, size), ("tokens",), None, "stream 'x'", "tokens")
    assert "stream 'x'" in str(caught.value)


def write_shard(folder, lengths, **options):
    path, samples = builders.write_stream_files(
        folder, lengths, size_limit=None, lengths_file=False, **options
    )
    index = parse_index((path / "index.json").read_bytes(), str(path))
    (shard,) = index.shards
    data = np.fromfile(path / shard.raw.basename, np.uint8)
    return data, shard, samples


def spans_of(data, shard, num_samples=None, dtype=None):
    column = find_column(shard.layout, ("tokens",), dtype, "stream 'x'", "tokens")
    num_samples = shard.num_samples if num_samples is None else num_samples
    return sample_spans(data, num_samples, shard.layout, column, "stream 'x', shard 4")


LENGTHS = [1, 7, 255, 256, 300, 65_535, 65_536, 2]


@pytest.mark.parametrize("extra_columns", [False, True])
@pytest.mark.parametrize("dtype", sorted(builders.PRIMES))
@pytest.mark.parametrize("encoding", ["ndarray:{}", "ndarray", "bytes"])
def test_spans_find_every_token(tmp_path, encoding, dtype, extra_columns):
    encoding = encoding.format(dtype)
    data, shard, samples = write_shard(
        tmp_path / "s", LENGTHS, dtype=dtype, encoding=encoding, extra_columns=extra_columns
    )

    spans = spans_of(data, shard, dtype=dtype)

    assert spans.dtype == dtype
    assert spans.counts.tolist() == LENGTHS
    for i, tokens in enumerate(samples):
        np.testing.assert_array_equal(spans.read(data, i), tokens)
    edges = [[int(tokens[0]), int(tokens[-1])] for tokens in samples]
    assert spans.edges(data).tolist() == edges


def spans_in(folder, rows, encoding="ndarray"):
    """Write rows with MosaicML's writer; return the shard's bytes, and the spans in it."""
    with streaming.MDSWriter(out=str(folder), columns={"tokens": encoding}) as writer:
        for row in rows:
            writer.write({"tokens": row})
    index = parse_index((folder / "index.json").read_bytes(), "x")
    data = np.fromfile(folder / "shard.00000.mds", np.uint8)
    return data, spans_of(data, index.shards[0])


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:int32", "ndarray:int32:2,3"])
def test_spans_of_arrays_with_two_axes_are_read_flat(tmp_path, encoding):
    rows = [np.arange(6, dtype=np.int32).reshape(2, 3) + i for i in range(4)]
    data, spans = spans_in(tmp_path / "s", rows, encoding)
    assert [spans.read(data, i).tolist() for i in range(4)] == [
        row.ravel().tolist() for row in rows
    ]


def test_empty_bytes_have_a_span_of_no_tokens(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [3, 0, 2], encoding="bytes")
    assert spans_of(data, shard, dtype="int32").counts.tolist() == [3, 0, 2]


def test_a_count_that_is_not_the_indexs_is_refused(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [3, 4])
    with pytest.raises(DataError, match=r"shard 4: the shard of .* says it has 2 samples, but"):
        spans_of(data, shard, num_samples=3)


def test_a_shard_cut_short_is_refused(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [30, 40])
    for num_bytes in (0, 3, 7, 12, 100, len(data) - 1):
        with pytest.raises(DataError, match="stream 'x', shard 4"):
            spans_of(data[:num_bytes], shard)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (0, "0 bytes, but its columns add up to"),
        (2, "2 bytes, but its columns add up to"),
        (4, "a value of 0 bytes has a shape of"),
    ],
)
def test_a_last_sample_without_its_columns_or_its_shape_is_refused(tmp_path, left, message):
    data, shard, _ = write_shard(tmp_path / "s", [30, 40])
    offsets = data[4:16].view(np.uint32)
    offsets[2] = offsets[1] + left
    data[offsets[1] : offsets[1] + 4] = 0  # the size of its only column
    with pytest.raises(DataError, match=f"sample 1 of the shard: {message}"):
        spans_of(data[: offsets[2]], shard)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (["float32"], "has float32, but must have one of"),
        (["uint64"], "has uint64, but must have one of"),
        (["int32", "int64"], "column 'tokens' mixes int32, int64 in one shard"),
    ],
)
def test_dtypes_in_the_data_that_are_not_one_of_tokens_are_refused(tmp_path, dtypes, message):
    with pytest.raises(DataError, match=message):
        spans_in(tmp_path / "s", [np.arange(3, dtype=dtype) for dtype in dtypes])


@examples(100)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6)
)
def test_a_flipped_head_gives_spans_inside_the_shard_or_a_data_error(flippable, changes):
    original, shard = flippable
    data = original.copy()
    for place, value in changes:
        data[place % 400] = value
    try:
        spans = spans_of(data, shard)
    except DataError:
        return
    ends = spans.begins + spans.counts * np.dtype(spans.dtype).itemsize
    assert (spans.begins >= 0).all()
    assert (spans.counts >= 0).all()
    assert (ends <= len(data)).all()


@pytest.fixture(scope="module")
def flippable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flip")
    data, shard, _ = write_shard(folder / "s", [3, 40, 5], encoding="ndarray", extra_columns=True)
    return data, shard
