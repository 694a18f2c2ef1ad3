"""Our shards are those of MosaicML's MDSWriter, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import streaming
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streampack.mds.encoder import ShardEncoder, ShardLayout, index_json
from tests.helpers.examples import examples

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64")
INT64 = st.integers(-(2**63), 2**63 - 1)
JSONS = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@st.composite
def arrays(draw, dtype: str):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    if len(shape) == 1:
        shape = [draw(st.sampled_from([1, 3, 255, 256, 65_535, 65_536]))]
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, shape)
    return values.astype(dtype)


VALUES = {
    "str": st.text(max_size=40),
    "bytes": st.binary(max_size=40),
    "int": INT64,
    "json": JSONS,
    "float64": st.floats(allow_nan=False) | st.integers(-9, 9),
    "float32": st.floats(width=32) | st.integers(-9, 9) | st.just(0.1),
    "uint8": st.integers(0, 255),
    "uint64": st.integers(0, 2**64 - 1) | st.integers(0, 9).map(float),
    **{f"ndarray:{dtype}": arrays(dtype) for dtype in DTYPES + FLOATS},
}


@st.composite
def streams(draw):
    """Return columns, and samples for them."""
    encodings = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=4, max_size=4, unique=True))
    columns = dict(zip(names, encodings, strict=False))
    fields = {name: VALUES[encoding] for name, encoding in columns.items()}
    return columns, draw(st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=12))


def theirs(folder: Path, columns, samples, **options) -> dict[str, bytes]:
    """Return the files that MDSWriter writes."""
    with streaming.MDSWriter(columns=columns, out=str(folder), **options) as writer:
        for sample in samples:
            writer.write(sample)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def ours(columns, samples, **options) -> dict[str, bytes]:
    """Return the files that our encoder writes."""
    encoder = ShardEncoder(ShardLayout(columns=columns, **options))
    shards = [encoder.add(sample) for sample in samples] + [encoder.finish()]
    shards = [shard for shard in shards if shard is not None]
    files = {shard.name: shard.data for shard in shards}
    return files | {"index.json": index_json([shard.entry for shard in shards])}


@examples(25, many=60)
@given(stream=streams(), most=st.sampled_from([None, 2**17, 2**18, "1mb"]))
def test_raw_shards_and_index_are_those_of_mds_writer(stream, most):
    columns, samples = stream
    options = {"size_limit": most, "hashes": ["sha1", "xxh64"]}
    with TemporaryDirectory() as folder:
        expected = theirs(Path(folder) / "s", columns, samples, **options)
    if json.loads(expected["index.json"])["shards"][0]["samples"]:
        assert ours(columns, samples, **options) == expected


@pytest.mark.parametrize("size_limit", [500, 1000, 4096])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_shards_are_cut_where_mds_writer_cuts_them(tmp_path, dtype, size_limit):
    rng = np.random.default_rng(3)
    columns = {"tokens": f"ndarray:{dtype}", "url": "str", "n": "int", "score": "float64"}
    samples = [
        {"tokens": rng.integers(0, 9, n).astype(dtype), "url": "u" * int(n), "n": i, "score": i / 7}
        for i, n in enumerate(rng.integers(1, 20, 300))
    ]
    expected = theirs(tmp_path / "s", columns, samples, size_limit=size_limit)
    assert ours(columns, samples, size_limit=size_limit) == expected
    assert len(expected) > 3


@pytest.mark.parametrize("compression", ["br:3", "bz2", "bz2:1", "gz", "gz:1", "snappy"])
def test_compressed_shards_are_those_of_mds_writer_but_for_the_time_stamp(tmp_path, compression):
    columns = {"tokens": "ndarray:uint16"}
    samples = [{"tokens": np.arange(1, 400, dtype=np.uint16)}] * 5
    expected = theirs(tmp_path / "s", columns, samples, compression=compression)
    made = ours(columns, samples, compression=compression)
    assert expected.keys() == made.keys()
    name = next(name for name in made if name.startswith("shard"))
    if compression.startswith("gz"):
        expected[name] = expected[name][:4] + bytes(4) + expected[name][8:]
    assert expected[name] == made[name]
    assert expected["index.json"] == made["index.json"]


@pytest.mark.parametrize("compression", ["zstd", "zstd:1", "zstd:19"])
def test_zstd_shards_hold_the_bytes_of_mds_writer(tmp_path, compression):
    columns = {"tokens": "ndarray:uint16"}
    samples = [{"tokens": np.arange(1, 400, dtype=np.uint16)}] * 5
    raw = theirs(tmp_path / "s", columns, samples)["shard.00000.mds"]
    made = ours(columns, samples, compression=compression)
    data = made["shard.00000.mds.zstd"]
    config = json.dumps(compression).encode()
    assert zstandard.decompress(data).replace(config, b"null") == raw[:4] + _moved(
        raw, len(config) - 4
    )
    assert data == ours(columns, samples, compression=compression)["shard.00000.mds.zstd"]


def _moved(raw: bytes, num_bytes: int) -> bytes:
    """Return a shard from its offsets on, as if its config were longer."""
    offsets = np.frombuffer(raw[4:28], np.uint32) + num_bytes
    return offsets.astype(np.uint32).tobytes() + raw[28:]


def test_a_first_sample_larger_than_the_limit_leaves_no_empty_shard(tmp_path):
    columns, samples = {"tokens": "ndarray:uint8"}, [{"tokens": np.ones(900, np.uint8)}] * 2
    counts = [
        [shard["samples"] for shard in json.loads(files["index.json"])["shards"]]
        for files in (
            theirs(tmp_path / "s", columns, samples, size_limit=400),
            ours(columns, samples, size_limit=400),
        )
    ]
    assert counts == [[0, 1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("encoding", "value", "message"),
    [
        ("str", 3, r"must have type <class 'str'>, but has <class 'int'>"),
        ("int", 2**63, "9223372036854775808 does not fit an int64"),
        ("float64", "1", r"'1' must have type float64"),
        ("float64", 2**53 + 1, "9007199254740993 does not fit float64"),
        ("uint64", 2**64, "18446744073709551616 does not fit uint64"),
        ("int8", 0.5, "0.5 does not fit int8"),
        ("ndarray:uint16", np.zeros(2, np.int32), "an array of int32, but the column has uint16"),
        ("ndarray:uint16", np.zeros(0, np.uint16), r"an array of shape \(0,\) has no values"),
        ("ndarray:uint16", np.uint16(3), r"must have type <class 'numpy.ndarray'>"),
        ("json", {1, 2}, "set is not JSON serializable"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_refused(encoding, value, message):
    encoder = ShardEncoder(ShardLayout(columns={"x": encoding}))
    with pytest.raises((TypeError, ValueError), match=message):
        encoder.add({"x": value})
    assert encoder.finish() is None
