"""index.json and shard heads: what is read is right, and what cannot be is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.errors import DataError
from streampack.streams import mosaic
from streampack.streams.mds import find_column, parse_index, sample_places
from tests import builders

SHARD: dict[str, Any] = {
    "version": 2,
    "format": "mds",
    "compression": "zstd",
    "hashes": [],
    "size_limit": 4096,
    "samples": 3,
    "column_names": ["source", "tokens"],
    "column_encodings": ["str", "ndarray:int32"],
    "column_sizes": [None, None],
    "raw_data": {"basename": "shard.00000.mds", "bytes": 400, "hashes": {}},
    "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 100, "hashes": {}},
}


def index_text(**changes: Any) -> bytes:
    shard = copy.deepcopy(SHARD)
    for path, value in changes.items():
        target = shard
        *parents, last = path.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    return json.dumps({"version": 2, "shards": [shard]}).encode()


def test_index_gives_first_samples_sizes_and_parts():
    second = copy.deepcopy(SHARD) | {"samples": 4, "zip_data": None, "compression": None}
    second["raw_data"] = {"basename": "00001/shard.mds", "bytes": 500, "hashes": {"md5": "ab"}}
    text = json.dumps({"version": 2, "shards": [SHARD, second]}).encode()

    index = parse_index(text, "s3://a/index.json")

    assert index.first_sample.tolist() == [0, 3, 7]
    assert index.raw_bytes.tolist() == [400, 500]
    assert index.num_samples == 7
    assert index.shards[0].packed is not None
    assert index.shards[1].packed is None
    assert index.shards[1].raw.hashes == {"md5": "ab"}
    assert index.shards[0].layout is index.shards[1].layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "0 bytes that are no JSON"),
        (b"<html>404</html>", "16 bytes that are no JSON"),
        (index_text()[:100], "100 bytes that are no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", r"holds \[\], but an index.json is an object"),
        (b'{"version": 1, "shards": []}', "version is 1, but only MDS version 2"),
        (b'{"version": 2, "shards": []}', r"shards is \[\], but a stream needs 1 or more"),
        (b'{"version": 2}', "shards is None"),
        (b'{"version": 2, "shards": [3]}', r"shards\.0 is 3, but a shard is an object"),
        (index_text(version=3), r"shards\.0\.version is 3, but must be 2"),
        (index_text(format="json"), r"shards\.0\.format is 'json', but must be 'mds'"),
        (index_text(samples=0), "the stream is empty: its 1 shards hold 0 samples"),
        (index_text(samples=-1), r"shards\.0\.samples is -1, but must be an integer of 0 to"),
        (index_text(samples=True), r"shards\.0\.samples is True"),
        (index_text(samples="3"), r"shards\.0\.samples is '3'"),
        (index_text(samples=2.0), r"shards\.0\.samples is 2.0"),
        (index_text(samples=90), "samples is 90, which takes 1088 bytes or more, but raw_data.byt"),
        (index_text(raw_data__bytes=-5), r"raw_data\.bytes is -5"),
        (index_text(raw_data__bytes=2**40), r"raw_data\.bytes is 1099511627776"),
        (index_text(raw_data=None), r"raw_data is None, but must say basename"),
        (index_text(raw_data__hashes=[1]), r"raw_data\.hashes is \[1\]"),
        (index_text(raw_data__hashes={"md5": 1}), r"hashes is \{'md5': 1\}"),
        (index_text(zip_data__basename="../x"), r"zip_data\.basename is '../x', but must name a"),
        (index_text(raw_data__basename="/etc/passwd"), r"basename is '/etc/passwd'"),
        (index_text(raw_data__basename="a/../../b"), r"basename is 'a/../../b'"),
        (index_text(raw_data__basename=""), r"basename is ''"),
        (index_text(raw_data__basename="."), r"basename is '\.'"),
        (index_text(raw_data__basename="a\x00b"), r"basename is 'a\\x00b'"),
        (index_text(raw_data__basename="c:\\x"), r"basename is 'c:"),
        (index_text(raw_data__basename=".streampack/x.lock"), r"basename is '.streampack"),
        (index_text(raw_data__basename=7), r"basename is 7"),
        (index_text(zip_data__basename="shard.00000.MDS"), "'shard.00000.MDS' is used twice"),
        (index_text(compression=3), r"compression is 3, but must be a name or null"),
        (index_text(column_names="tokens"), "must be lists"),
        (index_text(column_names=["tokens"]), "do not match"),
        (index_text(column_names=[1, 2]), "do not match"),
        (index_text(column_sizes=[None, 0]), "do not match"),
        (index_text(column_sizes=[None, "8"]), "do not match"),
    ],
)
def test_a_wrong_index_is_refused_with_its_uri_and_field(text: bytes, message: str):
    with pytest.raises(DataError, match=message) as caught:
        parse_index(text, "s3://bucket/index.json")
    assert str(caught.value).startswith("s3://bucket/index.json: ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(field=st.sampled_from(sorted(SHARD)), value=json_values)
def test_any_value_in_any_field_is_taken_or_refused_with_a_data_error(field: str, value: Any):
    try:
        index = parse_index(index_text(**{field: value}), "x")
    except DataError:
        return
    assert index.num_samples >= 1


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
        ("str", None, "column 'tokens' is stored as 'str', but tokens, labels and masks must be"),
        ("pkl", None, "column 'tokens' is stored as 'pkl'"),
        ("bytes", None, "stored as 'bytes', which say no dtype; set tokens_dtype="),
        ("ndarray:float32", None, "holds float32, but must hold one of int8, int16"),
        ("ndarray:uint64", None, "holds uint64, but must hold one of"),
        ("ndarray:int32:4,x", None, "'ndarray:int32:4,x' states no shape"),
        ("ndarray:int32:0", None, "'ndarray:int32:0' states no shape"),
        ("ndarray:int32:4", 8, r"has column_sizes 8, but such values take 16"),
        ("ndarray:int32", 8, "has column_sizes 8, but such values take a size of their own"),
    ],
)
def test_a_column_that_holds_no_integers_is_refused(encoding: str, size: int, message: str):
    with pytest.raises(DataError, match=message) as caught:
        find_column(layout_of(encoding, size), ("tokens",), None, "stream 'x'", "tokens")
    assert "stream 'x'" in str(caught.value)


def test_a_missing_column_names_those_there_are():
    message = r"no column 'tokns'; it holds 'a', 'tokens' - did you mean 'tokens'\?; set tokens="
    with pytest.raises(DataError, match=message):
        find_column(layout_of("ndarray:int32"), ("tokns",), None, "stream 'x'", "tokens")


def test_the_first_name_that_is_there_is_taken():
    column = find_column(layout_of("ndarray:int32"), ("b", "tokens", "a"), None, "x", "tokens")
    assert column.name == "tokens"


def write_shard(folder, lengths, **options):
    path, samples = builders.write_stream_files(
        folder, lengths, size_limit=None, lengths_file=False, **options
    )
    index = parse_index((path / "index.json").read_bytes(), str(path))
    (shard,) = index.shards
    data = np.fromfile(path / shard.raw.basename, np.uint8)
    return data, shard, samples


def places_of(data, shard, num_samples=None, dtype=None):
    column = find_column(shard.layout, ("tokens",), dtype, "stream 'x'", "tokens")
    num_samples = shard.num_samples if num_samples is None else num_samples
    return sample_places(data, num_samples, shard.layout, column, "stream 'x', shard 4")


LENGTHS = [1, 7, 255, 256, 300, 65_535, 65_536, 2]


@pytest.mark.parametrize("extra_columns", [False, True])
@pytest.mark.parametrize("dtype", sorted(builders.PRIMES))
@pytest.mark.parametrize("encoding", ["ndarray:{}", "ndarray", "bytes"])
def test_places_find_every_token(tmp_path, encoding, dtype, extra_columns):
    encoding = encoding.format(dtype)
    data, shard, samples = write_shard(
        tmp_path / "s", LENGTHS, dtype=dtype, encoding=encoding, extra_columns=extra_columns
    )

    places = places_of(data, shard, dtype=dtype)

    assert places.dtype == dtype
    assert places.counts.tolist() == LENGTHS
    for i, tokens in enumerate(samples):
        np.testing.assert_array_equal(places.read(data, i), tokens)
    last = places.at(data, places.counts - 1)
    assert last.tolist() == [int(tokens[-1]) for tokens in samples]


@pytest.mark.parametrize("extra_columns", [False, True])
def test_places_of_a_fixed_shape_find_every_token(tmp_path, extra_columns):
    data, shard, samples = write_shard(
        tmp_path / "s", [6] * 9, dtype="uint16", encoding="ndarray:uint16:6",
        extra_columns=extra_columns,
    )  # fmt: skip
    places = places_of(data, shard)
    for i, tokens in enumerate(samples):
        np.testing.assert_array_equal(places.read(data, i), tokens)


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:int32", "ndarray:int32:2,3"])
def test_places_of_arrays_with_two_axes_are_read_flat(tmp_path, encoding):
    rows = [np.arange(6, dtype=np.int32).reshape(2, 3) + i for i in range(4)]
    with mosaic.MDSWriter(out=str(tmp_path / "s"), columns={"tokens": encoding}) as writer:
        for row in rows:
            writer.write({"tokens": row})
    index = parse_index((tmp_path / "s" / "index.json").read_bytes(), "x")
    data = np.fromfile(tmp_path / "s" / "shard.00000.mds", np.uint8)
    places = places_of(data, index.shards[0])
    assert [places.read(data, i).tolist() for i in range(4)] == [
        row.ravel().tolist() for row in rows
    ]


def test_empty_bytes_have_a_place_of_no_tokens(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [3, 0, 2], encoding="bytes")
    assert places_of(data, shard, dtype="int32").counts.tolist() == [3, 0, 2]


def test_a_count_that_is_not_the_indexs_is_refused(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [3, 4])
    with pytest.raises(DataError, match=r"shard 4: the shard of .* says it holds 2 samples, but"):
        places_of(data, shard, num_samples=3)


def test_a_shard_cut_short_is_refused(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [30, 40])
    for num_bytes in (0, 3, 7, 12, 100, len(data) - 1):
        with pytest.raises(DataError, match="stream 'x', shard 4"):
            places_of(data[:num_bytes], shard)


def test_bytes_that_are_no_whole_tokens_are_refused(tmp_path):
    data, shard, _ = write_shard(tmp_path / "s", [3, 5], dtype="uint16", encoding="bytes")
    with pytest.raises(DataError, match="sample 0 of the shard: column 'tokens' has 6 bytes of"):
        places_of(data, shard, dtype="int32")


def test_two_dtypes_in_one_shard_are_refused(tmp_path):
    with mosaic.MDSWriter(out=str(tmp_path / "s"), columns={"tokens": "ndarray"}) as writer:
        for dtype in ("int32", "int64"):
            writer.write({"tokens": np.arange(3, dtype=dtype)})
    index = parse_index((tmp_path / "s" / "index.json").read_bytes(), "x")
    data = np.fromfile(tmp_path / "s" / "shard.00000.mds", np.uint8)
    with pytest.raises(DataError, match="column 'tokens' holds int32, int64 in one shard"):
        places_of(data, index.shards[0])


@pytest.mark.parametrize("dtype", ["float32", "uint64"])
def test_a_dtype_found_in_the_data_that_is_no_token_is_refused(tmp_path, dtype):
    with mosaic.MDSWriter(out=str(tmp_path / "s"), columns={"tokens": "ndarray"}) as writer:
        writer.write({"tokens": np.arange(3, dtype=dtype)})
    index = parse_index((tmp_path / "s" / "index.json").read_bytes(), "x")
    data = np.fromfile(tmp_path / "s" / "shard.00000.mds", np.uint8)
    with pytest.raises(DataError, match=f"holds {dtype}, but must hold one of"):
        places_of(data, index.shards[0])


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6)
)
def test_a_flipped_head_gives_places_inside_the_shard_or_a_data_error(flippable, changes):
    original, shard = flippable
    data = original.copy()
    for place, value in changes:
        data[place % 400] = value
    try:
        places = places_of(data, shard)
    except DataError:
        return
    ends = places.begins + places.counts * np.dtype(places.dtype).itemsize
    assert (places.begins >= 0).all()
    assert (places.counts >= 0).all()
    assert (ends <= len(data)).all()


@pytest.fixture(scope="module")
def flippable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flip")
    data, shard, _ = write_shard(folder / "s", [3, 40, 5], encoding="ndarray", extra_columns=True)
    return data, shard
