"""A length file has the lengths of its stream's shards, and is refused for any other stream."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from streampack.errors import DataError
from streampack.index import write_lengths
from streampack.mds.index import parse_index
from streampack.mds.length_file import (
    LENGTH_FILE,
    length_file_pieces,
    open_length_file,
    write_length_file,
)
from streampack.streams import Stream, open_stream
from tests.helpers import builders

LENGTHS = [1 + (i * 37) % 200 for i in range(50)]


@pytest.fixture
def stream(tmp_path):
    path, samples = builders.write_stream_files(tmp_path / "code", LENGTHS, seed=3)
    text = (path / "index.json").read_bytes()
    return path, text, parse_index(text, str(path / "index.json")), samples


def test_length_file_says_what_the_shards_hold(stream):
    path, text, index, samples = stream
    file = open_length_file(path / LENGTH_FILE, text, index)

    assert (file.column, file.num_samples, file.num_tokens) == ("tokens", 50, sum(LENGTHS))
    assert (len(file.numbers), file.min_tokens) == (len(index.shards), min(LENGTHS))
    for shard in range(len(index.shards)):
        first, last = (int(end) for end in index.first_sample[shard : shard + 2])
        assert file.shard_lengths(shard).tolist() == LENGTHS[first:last]
        assert file.shard_tokens()[shard] == sum(LENGTHS[first:last])
        edges = [[int(tokens[0]), int(tokens[-1])] for tokens in samples[first:last]]
        assert file.shard_edges(shard).tolist() == edges
    ends = index.first_sample.tolist()
    totals = [sum(LENGTHS[first:last]) for first, last in pairwise(ends)]
    assert file.shard_tokens().tolist() == totals


def test_stale_length_file_refuses_the_stream_and_indexing_mends_it(stream):
    path, *_ = stream
    file = path / "index.json"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(DataError, match=f"is stale.*streampack index {path}"):
        open_stream(Stream(local=str(path)), 0)
    write_lengths(path)
    assert open_stream(Stream(local=str(path)), 0).shards.has_lengths


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *[(lambda content, n=n: content[:n], "") for n in (0, 20, 95, 97, 300)],
        (lambda content: content + b"x", r"has \d+ bytes, but should have \d+"),
        (lambda content: content[:8] + b"\x09" + content[9:], "version 9, but only 1 and 2"),
    ],
)
def test_a_damaged_length_file_is_refused(stream, damage, message):
    path, text, index, _ = stream
    file = path / LENGTH_FILE
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        DataError, match=rf"lengths\.bin: .*{message}.*rewrite it: streampack index"
    ):
        open_length_file(file, text, index)


def test_flipped_length_is_refused_when_its_shard_is_asked_for(stream):
    path, text, index, _ = stream
    file = path / LENGTH_FILE
    content = bytearray(file.read_bytes())
    opened = open_length_file(file, text, index)
    content[opened.head_bytes + 16 * len(opened.numbers)] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="shard 0 starts at sample 0 and its lengths add up to"):
        opened.shard_lengths(0)


@pytest.mark.parametrize("byte", [0, 7])
def test_a_shards_total_that_does_not_fit_the_streams_is_refused(stream, byte):
    path, text, index, _ = stream
    file = path / LENGTH_FILE
    opened = open_length_file(file, text, index)
    content = bytearray(file.read_bytes())
    content[opened.head_bytes + 8 + byte] ^= 128
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"its shards' tokens add up to -?\d+, but its header says"):
        opened.shard_tokens()


def test_lengths_that_are_not_the_shards_are_refused_when_it_is_opened(stream):
    path, text, index, _ = stream
    wrong = np.array(LENGTHS, np.uint32)
    wrong[[0, 1]] = wrong[[1, 0]]
    edges = np.zeros((len(wrong), 2), np.uint32)
    pieces = length_file_pieces(text, index, "tokens", wrong, edges)
    write_length_file(path / LENGTH_FILE, pieces)
    opened = open_stream(Stream(local=str(path)), 0)
    with pytest.raises(DataError, match=f"sample 0: 1 tokens, but .*lengths.bin says {LENGTHS[1]}"):
        opened.open_shard(0)
