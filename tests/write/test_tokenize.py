"""Text becomes a stream, in order, the same in any number of processes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import datasets
import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from streampack.errors import ConfigError, DataError
from streampack.streams import Stream, open_stream
from streampack.write import RowFormat, WriteOptions, write_texts
from streampack.write.text_files import read_chunks

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
@pytest.mark.parametrize("num_processes", [1, 2])
def test_jsonl_becomes_a_stream_in_order(tmp_path, tokenizer, num_processes, suffix):
    file = tmp_path / f"rows{suffix}"
    write_jsonl(file, [{"text": text, "id": i} for i, text in enumerate(TEXTS)])
    seen = []
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer), num_processes=num_processes)

    written = write_texts([file], tmp_path / "s", options, seen.append)

    assert decoded(tmp_path / "s", tokenizer) == TEXTS
    assert written.num_samples == len(TEXTS)
    assert open_stream(Stream(local=str(tmp_path / "s")), 0).has_length_file
    assert seen[-1].num_bytes == seen[-1].total_bytes == file.stat().st_size
    assert (seen[-1].num_samples, seen[-1].num_tokens) == (len(TEXTS), written.num_tokens)
    assert len(seen) > 2


def test_the_stream_is_the_same_in_any_number_of_processes(tmp_path, tokenizer):
    files = []
    for part in range(3):
        files.append(tmp_path / f"{part}.jsonl")
        write_jsonl(files[-1], [{"text": text} for text in TEXTS[part::3]])
    for num_processes in (1, 3):
        options = WriteOptions(rows=RowFormat(tokenizer=tokenizer), num_processes=num_processes)
        write_texts(files, tmp_path / str(num_processes), options)
    one, three = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("1", "3"))
    assert one == three


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
    written = write_texts([folder, folder / "b.txt"], tmp_path / "s", options)
    expected = ["alpha é", "beta\nbeta", "gamma", "row", "rows", "beta\nbeta"]
    assert decoded(tmp_path / "s", tokenizer) == expected
    assert written.num_skipped == 1


def test_small_vocabularies_are_stored_in_two_bytes(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("alpha")
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    write_texts([tmp_path / "a.txt"], tmp_path / "s", options)
    assert read_all(tmp_path / "s")[0].dtype == np.uint16


@pytest.mark.parametrize("num_processes", [1, 2])
def test_rows_of_token_ids_are_written_with_their_masks(tmp_path, num_processes):
    rows = [{"ids": [i, 1, 2], "mask": [False, True, 1]} for i in range(700)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    options = WriteOptions(
        rows=RowFormat(tokens_field="ids", extra_fields=("mask",)), num_processes=num_processes
    )
    write_texts([tmp_path / "a.jsonl"], tmp_path / "s", options)
    assert [tokens.tolist() for tokens in read_all(tmp_path / "s")] == [row["ids"] for row in rows]
    shard = open_stream(Stream(local=str(tmp_path / "s"), loss_mask="mask"), 0).open_shard(0)
    assert shard.loss_mask.read(shard.data, 3).tolist() == [0, 1, 1]


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a', r"a\.jsonl:3: not valid JSON \(.*\); fix or remove the line"),
        ("[1]", r"a\.jsonl:3: list, but a row must be a JSON object; leave out tokenizer="),
        ('{"txt": "a"}', r"a\.jsonl:3: no field 'text'; the row has 'txt' - did you mean 'txt'\?"),
        ('{"text": [1]}', r"a\.jsonl:3: field 'text' is list, but must be text"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(
    tmp_path, tokenizer, line, message, num_processes
):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n\n{line}\n')
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer), num_processes=num_processes)
    with pytest.raises(DataError, match=message):
        write_texts([tmp_path / "a.jsonl"], tmp_path / "s", options)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": "text"}, r"a\.jsonl:1: 'text' is not a list of integers; set tokenizer="),
        ({"tokens": [1, "2"]}, r"a\.jsonl:1: \[1, '2'\] is not a list of integers"),
        ({"tokens": [1, 2], "mask": [1]}, r"a\.jsonl:1: 2 tokens, but 1 values in 'mask'"),
        (
            {"tokens": [1, 2]},
            r"a\.jsonl:1: no field 'mask'; the row has 'tokens'; set extra_fields= to one",
        ),
        (
            {"id": 1, "text": "a"},
            r"set tokens_field= to one of them, or tokenizer= if 'text' is text$",
        ),
        ({"ids": [1]}, r"set tokens_field= to one of them$"),
    ],
)
def test_rows_that_hold_no_token_ids_are_refused(tmp_path, row, message):
    write_jsonl(tmp_path / "a.jsonl", [row])
    extra = ("mask",) if "mask" in message else ()
    with pytest.raises(DataError, match=message):
        write_texts(
            [tmp_path / "a.jsonl"], tmp_path / "s", WriteOptions(rows=RowFormat(extra_fields=extra))
        )


def test_files_that_cannot_be_read_are_refused(tmp_path, tokenizer):
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"ab\xff")
    (tmp_path / "a.jsonl.zst").write_bytes(b"no zstd")
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    cases = {
        "none": "none: does not exist; check the path",
        "empty": "empty: 0 files; name text or JSONL files",
        "binary.txt": r"binary\.txt: byte 2 is not valid UTF-8; name text files only",
        "a.jsonl.zst": r"a\.jsonl\.zst: cannot be decompressed",
        "a.jsonl.gz": r"a\.jsonl\.gz: cannot be decompressed \(Not a gzipped file",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            write_texts([tmp_path / name], tmp_path / "s", options)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("d.csv", r"make .*datasets\.Dataset\.from_csv\('.*d\.csv'\)\.to_json\('rows\.jsonl'\)"),
        ("d.tsv", r"make .*from_csv\('.*d\.tsv', sep='\\t'\)\.to_json\(.*\)"),
        ("d.parquet", r"make .*from_parquet\('.*d\.parquet'\)\.to_json\(.*\)"),
        ("README", "rename it if it is one of them"),
        ("a.py.zst", "rename it if it is one of them"),
    ],
)
def test_a_file_whose_name_says_neither_text_nor_jsonl_is_refused_alone_and_in_a_folder(
    tmp_path, tokenizer, name, way_out
):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_bytes(b"text,id")
    (folder / "z.txt").write_text("alpha")
    message = rf"{name}: is not a supported file; .*\.txt, .*\.jsonl, .*; {way_out}, or leave it"
    for path in (folder, folder / name):
        with pytest.raises(DataError, match=message):
            write_texts([path], tmp_path / "s", WriteOptions(rows=RowFormat(tokenizer=tokenizer)))
    (folder / "x.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"\(and 1 more\): is not a supported file"):
        write_texts([folder], tmp_path / "s", WriteOptions())
    assert not (tmp_path / "s").exists()


# datasets leaves the files open that it reads.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_the_way_out_makes_of_a_table_is_read(tmp_path, tokenizer):
    for name, text in (("d.csv", "text,id\nalpha,1\nbeta,2\n"), ("d.json", '[{"text": "gamma"}]')):
        (tmp_path / name).write_text(text)
    options = {"cache_dir": str(tmp_path / "cache")}
    for read, name in ((datasets.Dataset.from_csv, "csv"), (datasets.Dataset.from_json, "json")):
        rows = read(str(tmp_path / f"d.{name}"), **options)
        rows.to_json(str(tmp_path / f"{name}.jsonl"))
    paths = [tmp_path / "csv.jsonl", tmp_path / "json.jsonl"]
    write_texts(paths, tmp_path / "s", WriteOptions(rows=RowFormat(tokenizer=tokenizer)))
    assert decoded(tmp_path / "s", tokenizer) == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize("name", ["rows.json", "rows.JSONL", "rows.json.zst"])
def test_json_lines_are_rows_however_their_file_spells_that(tmp_path, tokenizer, name):
    write_jsonl(tmp_path / name, [{"text": "alpha"}, {"text": "beta"}])
    options = WriteOptions(rows=RowFormat(tokenizer=tokenizer))
    write_texts([tmp_path / name], tmp_path / "s", options)
    assert decoded(tmp_path / "s", tokenizer) == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[\n{"text": "a"},\n{"text": "b"}]',
            r"a\.json:1: not valid JSON \(.*\); make lines of a JSON",
        ),
        ('{\n"version": 1}', r"a\.json:1: not valid JSON \(.*\); make lines of a JSON array"),
        (
            '[{"text": "a"}, {"text": "b"}]',
            r"a\.json:1: an array of objects, but a line must be one row",
        ),
    ],
)
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_json_that_is_no_json_lines_is_refused_with_the_way_to_make_them(
    tmp_path, tokenizer, text, message, has_tokenizer
):
    (tmp_path / "a.json").write_text(text)
    rows = RowFormat(tokenizer=tokenizer if has_tokenizer else None)
    with pytest.raises(DataError, match=message) as raised:
        write_texts([tmp_path / "a.json"], tmp_path / "s", WriteOptions(rows=rows))
    assert f"from_json('{tmp_path}/a.json').to_json('rows.jsonl')" in str(raised.value)


@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_a_compressed_file_that_was_cut_anywhere_is_refused_and_a_chain_of_them_is_read(
    tmp_path, suffix
):
    pack = PACK[suffix]
    whole = pack(b"[1, 2]\n" * 3000) + pack(b"[3]\n") + pack(b"")
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(whole)
    rows = [row for chunk in read_chunks([path]) for _, row in chunk.rows]
    assert rows == [b"[1, 2]\n"] * 3000 + [b"[3]\n"]
    between = {0, len(whole) - len(pack(b"")), len(whole) - len(pack(b"[3]\n") + pack(b""))}
    for size in set(range(len(whole))) - between:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cannot be decompressed .*; copy it again"):
            list(read_chunks([path]))


def test_impossible_options_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    options = WriteOptions(rows=RowFormat(tokenizer=tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none\.json' cannot be loaded \(.*\); give a tokenizer"):
        write_texts([tmp_path / "a.txt"], tmp_path / "s", options)
    with pytest.raises(ConfigError, match=r"a\.txt: is text; set tokenizer= to a tok"):
        write_texts([tmp_path / "a.txt"], tmp_path / "s", WriteOptions())
    with pytest.raises(ConfigError, match="num_processes=0 must be 1 or more; leave it out"):
        WriteOptions(num_processes=0)


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
    rows = RowFormat(tokens_field="ids")
    with pytest.raises(DataError, match=r"a\.jsonl:1: no field 'ids'; the row has 'input_ids', "):
        write_texts([tmp_path / "a.jsonl"], tmp_path / "t", WriteOptions(rows=rows))


@pytest.mark.parametrize(
    ("line", "extra", "message"),
    [
        ("3", (), "int, but a row must be a JSON object or a list of token ids"),
        ('["a"]', (), r"\['a'\] is not a list of integers; set tokenizer= for text"),
        ("[1]", ("mask",), "list, but a row must be a JSON object"),
    ],
)
def test_a_row_that_is_neither_object_nor_ids_is_refused(tmp_path, line, extra, message):
    (tmp_path / "a.jsonl").write_text(line)
    options = WriteOptions(rows=RowFormat(extra_fields=extra))
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {message}"):
        write_texts([tmp_path / "a.jsonl"], tmp_path / "s", options)
