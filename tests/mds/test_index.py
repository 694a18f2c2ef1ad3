"""index.json: correct values are accepted, and impossible ones are refused."""

from __future__ import annotations

import copy
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import DataError
from streampack.mds.index import parse_index
from tests.helpers.examples import examples
from tests.helpers.index_json import SHARD, index_text


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
        (b"[" * 100_000, "not JSON"),
        (b'{"version": 2, "shards": []}', r"shards is \[\], but a stream needs 1 or more"),
        (b'{"version": 2, "shards": [3]}', r"shards\.0 is 3, but must be an object"),
        (index_text(version=3), r"shards\.0\.version is 3, but must be 2"),
        (index_text(samples=0), "the stream is empty: its 1 shards hold 0 samples"),
        (index_text(samples=90), "samples is 90, which takes 1088 bytes or more, but raw_data.byt"),
        (index_text(raw_data__bytes=2**40), r"raw_data\.bytes is 1099511627776"),
        (index_text(raw_data=None), r"raw_data is None, but must hold basename"),
        (index_text(raw_data__hashes=[1]), r"raw_data\.hashes is \[1\]"),
        (index_text(raw_data__basename=""), r"basename is ''"),
        (index_text(raw_data__basename="a\x00b"), r"basename is 'a\\x00b'"),
        (index_text(raw_data__basename="c:\\x"), r"basename is 'c:"),
        (index_text(compression="zstd:99"), r"compression is 'zstd:99', but .* with one of br,"),
        (index_text(zip_data__basename="shard.00000.MDS"), "'shard.00000.MDS' is used twice"),
        (
            index_text(column_names="tokens"),
            r"shards\.0: .*, column_encodings and column_sizes are .*, but must be lists; rewrite",
        ),
        (
            index_text(column_names=["tokens"]),
            r"shards\.0: .*, column_encodings and column_sizes are .*, but do not match.*; rewrite",
        ),
        (index_text(column_sizes=[None, 0]), "do not match"),
    ],
)
def test_a_wrong_index_is_refused_with_its_uri_and_field(text, message):
    with pytest.raises(DataError, match=message) as caught:
        parse_index(text, "s3://bucket/index.json")
    assert str(caught.value).startswith("s3://bucket/index.json: ")


def test_a_wrong_entry_is_named_by_its_number():
    second = copy.deepcopy(SHARD) | {"samples": -1}
    text = json.dumps({"version": 2, "shards": [SHARD, second]}).encode()
    with pytest.raises(DataError, match=r"x: shards\.1\.samples is -1"):
        parse_index(text, "x")


def test_an_index_takes_no_memory_for_the_entries_of_all_its_shards_together():
    entry = json.dumps(SHARD)
    entries = (entry.replace("00000", f"{number:05d}") for number in range(10_000))
    text = f'{{"version": 2, "shards": [{", ".join(entries)}]}}'.encode()
    tracemalloc.start()
    try:
        index = parse_index(text, "x")
        assert tracemalloc.get_traced_memory()[1] < 3.5 * len(text)
    finally:
        tracemalloc.stop()
    assert index.num_samples == 30_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@examples(40, many=100)
@given(field=st.sampled_from(sorted(SHARD)), value=json_values)
def test_any_value_in_any_field_is_taken_or_refused_with_a_data_error(field, value):
    try:
        index = parse_index(index_text(**{field: value}), "x")
    except DataError:
        return
    assert index.num_samples >= 1
