"""Text becomes a stream, in order, the same in any number of processes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from streampack.errors import ConfigError, DataError
from streampack.streams import Stream, open_stream
from streampack.write import RowFormat, WriteOptions, write_texts

TEXTS = [f"line {i}: " + "the quick brown fox " * (i % 9) for i in range(1500)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(path))
    return path


def read_all(path) -> list[np.ndarray]:
    opened = open_stream(Stream(local=str(path)), 0)
    shards = [opened.open_shard(shard) for shard in range(opened.num_shards)]
    return [
        shard.tokens.read(shard.data, i)
        for shard in shards
        for i in range(len(shard.tokens.counts))
    ]


def decoded(path, tokenizer) -> list[str]:
    made = Tokenizer.from_file(str(tokenizer))
    return [made.decode(tokens.tolist()) for tokens in read_all(path)]


def write_jsonl(path, rows) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(PACK.get(path.suffix, bytes)(text))


PACK = {".zst": zstandard.compress, ".gz": gzip.compress}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_jsonl_becomes_a_stream_in_order(tmp_path, tokenizer, num_workers, suffix):
    file = tmp_path / f"rows{suffix}"
    write_jsonl(file, [{"text": text, "id": i} for i, text in enumerate(TEXTS)])
    seen = []
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer), num_workers=num_workers)

    written = write_texts([file], tmp_path / "s", options, seen.append)

    assert decoded(tmp_path / "s", tokenizer) == TEXTS
    assert written.num_samples == len(TEXTS)
    assert open_stream(Stream(local=str(tmp_path / "s")), 0).has_length_file
    assert seen[-1].num_bytes == seen[-1].total_bytes == file.stat().st_size
    assert (seen[-1].num_samples, seen[-1].num_tokens) == (len(TEXTS), written.num_tokens)
    assert len(seen) > 2


def test_text_files_of_a_folder_are_one_sample_each_in_sorted_order(tmp_path, tokenizer):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("beta\nbeta")
    (folder / "a.md").write_text("alpha é")
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "sub" / "c.txt.zst").write_bytes(zstandard.compress(b"gamma"))
    (folder / "z.jsonl").write_text('{"text": "row"}\n\n{"text": "rows"}')
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    written = write_texts([folder], tmp_path / "s", options)
    expected = ["alpha é", "beta\nbeta", "gamma", "row", "rows"]
    assert decoded(tmp_path / "s", tokenizer) == expected
    assert written.num_skipped == 1


def test_small_vocabularies_are_stored_in_two_bytes(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("alpha")
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    write_texts([tmp_path / "a.txt"], tmp_path / "s", options)
    assert read_all(tmp_path / "s")[0].dtype == np.uint16


@pytest.mark.parametrize("num_workers", [1, 2])
def test_rows_of_token_ids_are_written_with_their_masks(tmp_path, num_workers):
    rows = [{"ids": [i, 1, 2], "mask": [False, True, 1]} for i in range(700)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = WriteOptions(rows=RowFormat(tokens="ids", columns=("mask",)), num_workers=num_workers)
    write_texts([tmp_path / "a.jsonl"], tmp_path / "s", options)
    assert [tokens.tolist() for tokens in read_all(tmp_path / "s")] == [row["ids"] for row in rows]
    shard = open_stream(Stream(local=str(tmp_path / "s"), loss_mask="mask"), 0).open_shard(0)
    assert shard.loss_mask.read(shard.data, 3).tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", ["rows.json", "rows.JSONL", "rows.json.zst"])
def test_json_lines_are_rows_however_their_file_spells_that(tmp_path, tokenizer, name):
    write_jsonl(tmp_path / name, [{"text": "alpha"}, {"text": "beta"}])
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    write_texts([tmp_path / name], tmp_path / "s", options)
    assert decoded(tmp_path / "s", tokenizer) == ["alpha", "beta"]


def test_impossible_options_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    options = WriteOptions(rows=RowFormat(tokenizer=tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none\.json' cannot be loaded \(.*\); give a tokenizer"):
        write_texts([tmp_path / "a.txt"], tmp_path / "s", options)
    with pytest.raises(ConfigError, match=r"a\.txt: is text; set tokenizer= to a tok"):
        write_texts([tmp_path / "a.txt"], tmp_path / "s", WriteOptions())
    with pytest.raises(ConfigError, match="num_workers=0 must be at least 1; omit it"):
        WriteOptions(num_workers=0)


def test_the_processes_that_tokenize_do_not_load_streaming():
    check = "import sys, streampack.write.rows; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("as_row", [lambda ids: {"input_ids": ids}, lambda ids: ids])
def test_input_ids_and_bare_lists_are_found_where_no_field_is_named(tmp_path, as_row):
    ids = [[1, 2, 3], [4], [5, 6]]
    write_jsonl(tmp_path / "a.jsonl", [as_row(each) for each in ids])
    write_texts([tmp_path / "a.jsonl"], tmp_path / "s", WriteOptions())
    assert [tokens.tolist() for tokens in read_all(tmp_path / "s")] == ids


def test_a_field_that_is_named_is_the_one_that_is_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1], "tokens": [2]}])
    write_texts([tmp_path / "a.jsonl"], tmp_path / "s", WriteOptions())
    assert read_all(tmp_path / "s")[0].tolist() == [2]
    rows = RowFormat(tokens="ids")
    with pytest.raises(DataError, match=r"a\.jsonl, row 0: .*'ids'"):
        write_texts([tmp_path / "a.jsonl"], tmp_path / "t", WriteOptions(rows=rows))
