"""Opened MDS streams: columns, lengths and types, and what is refused."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import streaming

from streampack.errors import DataError
from streampack.streams import Stream, open_stream
from tests.helpers import builders

LENGTHS = [1 + (i * 37) % 300 for i in range(40)]


def test_lengths_and_edges_are_the_same_with_and_without_a_length_file(tmp_path):
    opened = []
    for lengths_file in (True, False):
        path, samples = builders.write_stream_files(
            tmp_path / str(lengths_file), LENGTHS, compression="zstd", lengths_file=lengths_file
        )
        opened.append(open_stream(Stream(local=str(path)), 0))
    with_file, without = opened
    assert with_file.shards.has_lengths
    assert not without.shards.has_lengths
    assert with_file.digest == without.digest
    for shard in range(with_file.num_shards):
        first, last = with_file.first_sample[shard : shard + 2]
        lengths = [len(tokens) for tokens in samples[first:last]]
        edges = [[int(tokens[0]), int(tokens[-1])] for tokens in samples[first:last]]
        for stream in opened:
            assert stream.shard_lengths(shard).tolist() == lengths
            assert stream.shard_lengths(shard).dtype == np.int64
            assert stream.shard_edges(shard).tolist() == edges


@pytest.mark.parametrize("extra_columns", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64"])
def test_total_is_exact_with_lengths_and_near_with_bytes(tmp_path, dtype, extra_columns):
    lengths = [300 + i for i in range(40)]
    path, _ = builders.write_stream_files(
        tmp_path / "s", lengths, dtype=dtype, extra_columns=extra_columns, size_limit=2**16
    )
    assert open_stream(Stream(local=str(path)), 0).total_tokens() == sum(lengths)
    (path / "lengths.bin").unlink()
    estimated = open_stream(Stream(local=str(path)), 0).total_tokens()
    assert estimated == pytest.approx(sum(lengths), rel=0.03)


def test_a_stream_is_never_written_to_and_opens_twice(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "r", LENGTHS)
    for make in (Stream, streaming.Stream):
        stream = make(remote=str(path), local=str(tmp_path / make.__module__), repeat=2)
        before = dict(vars(stream))
        first, second = open_stream(stream, 0), open_stream(stream, 1)
        first.open_shard(0)
        assert vars(stream) == before
        assert first.digest == second.digest
        assert (first.proportion, first.repeat, first.choose) == (None, 2, None)
        assert (first.number, second.number) == (0, 1)


def test_name_is_the_one_given_or_the_last_part_of_the_path(tmp_path):
    path, _ = builders.write_stream_files(tmp_path / "web" / "train", LENGTHS)
    assert open_stream(Stream(local=str(path)), 0).name == "train"
    assert open_stream(Stream(local=str(tmp_path / "web"), split="train"), 0).name == "train"
    assert open_stream(Stream(local=f"{path}/", name="pages"), 0).name == "pages"
    remote = Stream(remote=f"file://{tmp_path}/web/train/", local=str(tmp_path / "x"))
    assert open_stream(remote, 0).name == "train"


def test_digest_tells_contents_and_columns_apart_and_not_paths(tmp_path):
    values = {"other": [np.ones(n, np.int32) for n in LENGTHS]}
    options = {"columns": {"other": "ndarray:int32"}, "values": values}
    one, _ = builders.write_stream_files(tmp_path / "a", LENGTHS, **options)
    same, _ = builders.write_stream_files(tmp_path / "b", LENGTHS, **options)
    longer, _ = builders.write_stream_files(tmp_path / "c", [*LENGTHS[:-1], 299], **options)
    digest = open_stream(Stream(local=str(one)), 0).digest
    assert open_stream(Stream(local=str(same), name="n", repeat=2), 1).digest == digest
    assert open_stream(Stream(local=str(longer)), 0).digest != digest
    assert open_stream(Stream(local=str(one), loss_mask="other"), 0).digest != digest
    assert open_stream(Stream(local=str(one), tokens="other"), 0).digest != digest


def test_input_ids_are_found_where_no_column_is_named(tmp_path):
    path, samples = builders.write_stream_files(tmp_path / "s", LENGTHS, column="input_ids")
    for stream in (Stream(local=str(path)), streaming.Stream(local=str(path))):
        opened = open_stream(stream, 0)
        assert opened.shards.has_lengths
        shard = opened.open_shard(0)
        np.testing.assert_array_equal(shard.tokens.read(shard.data, 1), samples[1])
    with pytest.raises(DataError, match=r"no column 'ids'; it has 'input_ids'"):
        open_stream(Stream(local=str(path), tokens="ids"), 0)


@pytest.mark.parametrize("option", ["labels", "loss_mask"])
def test_a_column_not_as_long_as_the_tokens_is_refused(tmp_path, option):
    values = [np.ones(n + (i == 25), np.int32) for i, n in enumerate(LENGTHS)]
    path, _ = builders.write_stream_files(
        tmp_path / "web", LENGTHS, columns={"x": "ndarray:int32"}, values={"x": values}
    )
    opened = open_stream(Stream(local=str(path), **{option: "x"}), 0)
    count = LENGTHS[25]
    message = f"stream 'web', sample 25: {count} tokens, but {count + 1} values in its {option} col"
    with pytest.raises(DataError, match=message):
        _ = [opened.open_shard(shard) for shard in range(opened.num_shards)]


@pytest.mark.parametrize("lengths_file", [False, True])
def test_a_sample_without_tokens_has_a_length_of_0(tmp_path, lengths_file):
    lengths = [0, *LENGTHS, 0]
    path, samples = builders.write_stream_files(
        tmp_path / "web", lengths, encoding="bytes", lengths_file=lengths_file
    )
    opened = open_stream(Stream(local=str(path), tokens="tokens:int32"), 0)

    found = [opened.shard_lengths(shard) for shard in range(opened.num_shards)]
    edges = np.concatenate([opened.shard_edges(shard) for shard in range(opened.num_shards)])

    assert np.concatenate(found).tolist() == lengths
    assert edges[1:-1].tolist() == [[int(each[0]), int(each[-1])] for each in samples[1:-1]]
    assert opened.shards.may_be_empty


@pytest.mark.parametrize("lengths_file", [False, True])
def test_an_opened_stream_can_be_pickled(tmp_path, lengths_file):
    path, samples = builders.write_stream_files(
        tmp_path / "r", LENGTHS, compression="zstd", lengths_file=lengths_file
    )
    opened = open_stream(Stream(remote=str(path), local=str(tmp_path / "l")), 0)
    opened.open_shard(0)
    again = pickle.loads(pickle.dumps(opened))
    shard = again.open_shard(1)
    first = int(again.first_sample[1])
    np.testing.assert_array_equal(shard.tokens.read(shard.data, 0), samples[first])
    assert again.shard_lengths(1).tolist() == opened.shard_lengths(1).tolist()


def test_labels_and_masks_stored_as_bytes_have_types_of_their_own(tmp_path):
    masks = [np.arange(n, dtype=np.uint8) % 2 for n in LENGTHS]
    labels = [np.where(mask, np.arange(len(mask)), -100).astype(np.int32) for mask in masks]
    path, samples = builders.write_stream_files(
        tmp_path / "s",
        LENGTHS,
        dtype="uint16",
        encoding="bytes",
        columns={"mask": "bytes", "labels": "bytes"},
        values={
            "mask": [each.tobytes() for each in masks],
            "labels": [each.tobytes() for each in labels],
        },
    )
    options = {"local": str(path), "tokens": "tokens:uint16"}

    stream = Stream(loss_mask="mask:uint8", labels="labels:int32", **options)
    shard = open_stream(stream, 0).open_shard(0)
    for i in range(len(shard.tokens.counts)):
        np.testing.assert_array_equal(shard.tokens.read(shard.data, i), samples[i])
        np.testing.assert_array_equal(shard.labels.read(shard.data, i), labels[i])
        np.testing.assert_array_equal(shard.loss_mask.read(shard.data, i), masks[i])

    # Without a type of their own they have the tokens', and are twice as many then.
    message = r"values in its labels column; .*as int32 .*labels='labels:int32'"
    with pytest.raises(DataError, match=message):
        open_stream(Stream(**options, labels="labels", check_dtypes=False), 0).open_shard(0)
    options |= {"labels": "labels:int32", "loss_mask": "mask"}
    with pytest.raises(DataError, match=r"loss_mask='mask:uint8'|has \d+ bytes of values"):
        open_stream(Stream(**options), 0).open_shard(0)


def test_the_types_of_a_rewritten_folder_with_an_equal_index_are_checked_again(tmp_path):
    tokens = [np.arange(1000, 1000 + 2 * n, dtype=np.uint16) for n in LENGTHS]
    halves = [np.stack([np.arange(n) + 7, 0 * np.arange(n)], 1).astype(np.uint16) for n in LENGTHS]
    written = []
    for values in (tokens, halves):  # the second is int32 with zeros in the upper half
        path = tmp_path / "s"
        shutil.rmtree(path, ignore_errors=True)
        with streaming.MDSWriter(out=str(path), columns={"tokens": "bytes"}) as writer:
            for row in values:
                writer.write({"tokens": row.tobytes()})
        written.append((path / "index.json").read_bytes())
        stream = open_stream(Stream(local=str(path), tokens="tokens:uint16"), 0)
        if values is tokens:
            stream.open_shard(0)
        else:
            with pytest.raises(DataError, match="tokens='tokens:int32'"):
                stream.open_shard(0)
    assert written[0] == written[1]
