"""The streams that we write are read back; failed writes leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

import datasets
import numpy as np
import pytest

from streampack import Download
from streampack.errors import ConfigError, DataError
from streampack.mds.index import INDEX_FILE, parse_index
from streampack.streams import Stream, open_stream
from streampack.write import write_stream
from tests.helpers import builders, caches

LENGTHS = [1 + (i * 37) % 300 for i in range(40)]


def samples_of(dtype: str = "int32") -> list[np.ndarray]:
    return [builders.tokens_of(1, i, length, dtype) for i, length in enumerate(LENGTHS)]


def read_all(path, **options) -> list[list[int]]:
    opened = open_stream(Stream(local=str(path), **options), 0)
    assert opened.shards.has_lengths
    return caches.read_all(opened)


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_written_samples_are_read_back(tmp_path, dtype, compression):
    samples = samples_of(dtype)
    written = write_stream(
        samples, tmp_path / "s", tokens_dtype=dtype, compression=compression, size_limit="4kb"
    )
    assert (written.num_samples, written.num_tokens) == (40, sum(LENGTHS))
    assert written.num_shards > 1
    assert written.num_skipped == 0
    assert read_all(tmp_path / "s") == [tokens.tolist() for tokens in samples]
    assert not (tmp_path / "s.partial").exists()


def test_no_flipped_bit_of_a_written_zstd_shard_is_delivered(tmp_path):
    path = tmp_path / "s"
    write_stream(samples_of()[:3], path, compression="zstd", hashes=())
    file = next(path.glob("*.zstd"))
    shard = parse_index((path / "index.json").read_bytes(), "x").shards[0]
    whole, raw = file.read_bytes(), caches.decompressed(file, shard)
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        with suppress(DataError):  # most flips are errors, and some change nothing
            assert caches.decompressed(file, shard) == raw, place


def test_lists_and_dicts_are_taken_and_other_columns_kept(tmp_path):
    rows = [
        {"ids": [1, 2, 3], "mask": np.array([0, 1, 1], np.uint8), "source": "a", "n": 1, "m": {}},
        {"ids": [4], "mask": np.array([1], np.uint8), "source": "b", "n": 2, "m": {"x": [1]}},
    ]
    write_stream(rows, tmp_path / "s", tokens="ids", compression=None)
    assert encodings_of(tmp_path / "s") == {
        "ids": "ndarray:int32",
        "m": "json",
        "mask": "ndarray:uint8",
        "n": "int",
        "source": "str",
    }
    assert read_all(tmp_path / "s", tokens="ids", loss_mask="mask") == [[1, 2, 3], [4]]
    assert "ids" in rows[0]
    assert isinstance(rows[0]["ids"], list)


def test_samples_without_tokens_are_skipped_and_counted(tmp_path):
    written = write_stream([[], [1, 2], np.zeros(0, np.int32), [3]], tmp_path / "s")
    assert (written.num_samples, written.num_tokens, written.num_skipped) == (2, 3, 2)
    assert read_all(tmp_path / "s") == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("sample", "dtype", "message"),
    [
        ([0.5, 1.5], "uint16", r"is float64 of shape \(2,\), but must be one row of integer"),
        ([1, 70_000], "uint16", r"token ids 1 to 70000 do not fit uint16 .* set tokens_dtype="),
        ({"text": "x"}, "uint16", "no 'tokens'; it has 'text'; set tokens="),
        ({"tokens": [1], "more": 3}, "uint16", "has 'tokens', 'more', but the first sample has"),
        ([-100, 1], "int32", "token id -100, but ids must be 0 to 4294967294"),
        (
            np.array([1, -100, 1], np.int32),
            "int32",
            "token id -100, but ids must be 0 to 429496729",
        ),
        (np.array([1, 2**32 - 1, 1]), "int64", "token id 4294967295, but ids must be 0 to 429496"),
        (np.array([1, 2**40, 1], np.uint64), "int64", "token id 1099511627776, but ids must be 0"),
    ],
)
def test_a_sample_that_cannot_be_written_is_refused_and_leaves_nothing(
    tmp_path, sample, dtype, message
):
    with pytest.raises(DataError, match=f"sample 1: {message}"):
        write_stream([[1, 2], sample], tmp_path / "s", tokens_dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def encodings_of(path) -> dict[str, str]:
    shard = json.loads((path / "index.json").read_text())["shards"][0]
    return dict(zip(shard["column_names"], shard["column_encodings"], strict=True))


def read_targets(path, **options) -> list[list[int]]:
    shard = open_stream(Stream(local=str(path), **options), 0).open_shard(0)
    places = shard.labels or shard.loss_mask
    return [places.read(shard.data, i).tolist() for i in range(len(places.counts))]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_lists_of_an_integer_for_each_token_are_read_back_as_masks_and_labels(tmp_path, dtype):
    masks = [[False, True, True], [0, 1], (1,), np.array([True, False])]
    labels = [[-100, 12, 13], [5, -100], [1], [-100, 2]]
    rows = [
        {"tokens": [7] * len(mask), "loss_mask": mask, "labels": label, "spans": [0, 1], "s": ["a"]}
        for mask, label in zip(masks, labels, strict=True)
    ]
    write_stream(rows, tmp_path / "s", tokens_dtype=dtype)
    encodings = encodings_of(tmp_path / "s")
    assert encodings["labels"] == ("ndarray:int64" if dtype == "int64" else "ndarray:int32")
    assert (encodings["spans"], encodings["s"]) == ("json", "json")
    expected = [[0, 1, 1], [0, 1], [1], [1, 0]]
    assert read_targets(tmp_path / "s", loss_mask="loss_mask") == expected
    assert read_targets(tmp_path / "s", labels="labels") == labels


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_rows_are_written_alike_whatever_type_their_arrays_have(tmp_path, form):
    rows = {"input_ids": [[11, 12, 13], [14]], "labels": [[-100, 12, 13], [14]]}
    rows |= {
        "loss_mask": [[0, 1, 1], [1]],
        "id": [1, 2],
        "score": [0.5, 1.0],
        "kept": [True, False],
    }
    write_stream(datasets.Dataset.from_dict(rows).with_format(form), tmp_path / "s")
    assert read_all(tmp_path / "s") == rows["input_ids"]
    assert read_targets(tmp_path / "s", labels="labels") == rows["labels"]
    assert read_targets(tmp_path / "s", loss_mask="loss_mask") == rows["loss_mask"]


@pytest.mark.parametrize("later", [[0.5, 1], [2**31, 1], [[1], [1, 2]], [None, 1], [], 3, [1]])
def test_a_list_unlike_the_first_samples_is_refused(tmp_path, later):
    rows = [{"tokens": [5, 6], "mask": [0, 1]}, {"tokens": [5, 6], "mask": later}]
    message = r"sample 1: 'mask' is .* must have one integer of .*2147483647 for each of the 2"
    with pytest.raises(DataError, match=message):
        write_stream(rows, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_the_largest_token_id_is_written(tmp_path):
    write_stream([[1, 2**32 - 2, 1]], tmp_path / "s", tokens_dtype="int64")
    assert read_all(tmp_path / "s") == [[1, 2**32 - 2, 1]]


@pytest.mark.parametrize("samples", [[], [[]]])
def test_no_samples_are_refused(tmp_path, samples):
    with pytest.raises(DataError, match=r"/s: no sample to write \(\d without tokens\)"):
        write_stream(samples, tmp_path / "s")


def test_a_folder_that_holds_something_is_refused_and_kept(tmp_path):
    (tmp_path / "s").mkdir()
    write_stream([[1]], tmp_path / "s")
    with pytest.raises(ConfigError, match="exists already and is not empty; remove it, or name"):
        write_stream([[2]], tmp_path / "s")
    assert read_all(tmp_path / "s") == [[1]]


def test_a_file_url_is_the_folder_that_it_names(tmp_path):
    assert write_stream([[1]], f"file://{tmp_path}/code").path == tmp_path / "code"
    assert read_all(tmp_path / "code") == [[1]]


def test_an_error_of_the_source_leaves_nothing(tmp_path):
    def source():
        yield [1, 2]
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        write_stream(source(), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_hashes_are_written_and_hold(tmp_path):
    write_stream(samples_of(), tmp_path / "r", hashes=["sha1", "md5"])
    stream = Stream(
        remote=str(tmp_path / "r"), local=str(tmp_path / "l"), download=Download(hash="md5")
    )
    assert open_stream(stream, 0).open_shard(0).tokens.counts.tolist() == LENGTHS
    assert import_module("streaming.base.format").get_index_basename() == INDEX_FILE


def test_a_live_writers_folder_is_never_removed(tmp_path):
    def slow():
        yield [1, 2]
        # Meanwhile, another writer of the same stream begins and finishes.
        with pytest.raises(DataError, match="no sample to write"):
            write_stream([], tmp_path / "s")
        yield [3]

    assert write_stream(slow(), tmp_path / "s", size_limit=512).num_samples == 2
    assert read_all(tmp_path / "s") == [[1, 2], [3]]
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_of_two_writers_the_one_that_ends_first_wins(tmp_path):
    def slow():
        yield [1, 2]
        write_stream([[7]], tmp_path / "s")

    message = r"s' cannot become the stream's folder .*; remove it, or name another"
    with pytest.raises(ConfigError, match=message):
        write_stream(slow(), tmp_path / "s")
    assert read_all(tmp_path / "s") == [[7]]
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from streampack.write import write_stream\n"
        "def rows():\n"
        "    yield [1]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_stream(rows(), Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False)
    assert len(list(tmp_path.glob("s.*.partial*"))) == 2

    write_stream([[2]], tmp_path / "s")

    assert [file.name for file in tmp_path.iterdir()] == ["s"]
