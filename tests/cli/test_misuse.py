"""Misuse of the verbs: the answer names a way out that works, and fits Python and YAML too.

Each row runs the wrong command, and then that of a user who follows the advice.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from streampack import PackedDataLoader, PackedStreamingDataset, Packing
from streampack.cli import app
from streampack.write import write_stream
from tests.helpers.inputs import write_table
from tests.helpers.words import words

CONFIG: dict[str, Any] = {
    "streams": [{"local": "ds"}],
    "packing": {"max_seq_len": 16},
    "batch_size": 2,
}
NO_STREAM = "does not exist; .*`streampack write` makes a stream of text, rows or token ids"
TEXT = "write a.txt --tokenizer tok.json --out o"
# The wrong command, the answer, and the command of a user who follows its advice.
MISUSES = (
    (
        "write rows.parquet --tokenizer tok.json --out o",
        "no column 'text'; it has 'body', 'n'; set text= to one of them",
        "write rows.parquet --tokenizer tok.json --out o --text=body",
    ),
    (
        f"{TEXT} --part-bytes 2xb",
        r"--part-bytes: part_bytes='2xb' is not a number of bytes; write 500000000, '500mb'",
        f"{TEXT} --part_bytes='500mb'",
    ),
    (f"{TEXT} --engine spark", r"--engine: engine='spark' is not one of processes\|ray", TEXT),
    (
        f"{TEXT} --tokens-dtype int3",
        "--tokens-dtype: .*did you mean 'int32'",
        f"{TEXT} --tokens_dtype=int32",
    ),
    ("inspect a.txt", NO_STREAM, "write a.txt --tokenizer tok.json --out a"),
    ("inspect above", "does not exist; set split='ds'", "inspect above --split='ds'"),
    (
        "simulate run.yaml --num-ranks 3 --ranks-per-node 2",
        "num_ranks=3 is not a multiple of ranks_per_node=2",
        "simulate run.yaml --num_ranks=4 --ranks_per_node=2",
    ),
    (
        "index a.txt --out idx --text body",
        "--text: is for texts; omit it, or set --tokenizer",
        "index a.txt --out=idx --tokenizer=tok.json",
    ),
    (
        "index a.txt --tokenizer tok.json",
        "--out: is needed for an index of texts; set it to a folder",
        "index a.txt --tokenizer=tok.json --out=idx",
    ),
    (
        "index a.txt --tokenizer tok.json --out idx --eos-id 2",
        "--eos-id: is for token files and rows of ids; omit it, or --tokenizer",
        "index a.txt --tokenizer=tok.json --out=idx",
    ),
    (
        "index a.txt b.txt --tokenizer tok.json --out idx",
        r"a.txt b.txt: an index of texts is of one source; name its files by a folder or a glob",
        "index *.txt --tokenizer=tok.json --out=idx",
    ),
    (
        "index ds --out idx",
        "--eos-id: is needed to find documents in rows; set it",
        "index ds --out=idx --eos-id=2",
    ),
    (
        "write rows.csv --tokenizer tok.json --out o",
        r"its only column is 'id;text', .* separated by ';'; write .* or as \.tsv with tabs",
        "write rows.tsv --tokenizer tok.json --out o",
    ),
    (
        "report run.yaml --stats empty.json",
        r"stats=\{\} has no streams; pass what loader\.stats\(\) returns, or the file",
        "report run.yaml --stats stats.json",
    ),
    ("report run.yaml --stats list.json", "stats=<list> has no streams", "report run.yaml"),
    ("plan run.yaml", "use `streampack simulate`", "simulate run.yaml"),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("misuse")
    words().save(str(folder / "tok.json"))
    write_stream([[1, 2, 3]] * 50, folder / "ds")
    write_stream([[1, 2, 3]] * 50, folder / "above" / "ds")
    write_table(folder / "rows.parquet", pa.table({"body": ["a text", "more"], "n": [1, 2]}), 9)
    (folder / "a.txt").write_text("a text")
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    chapters = {"chapters": [{"steps": 3, "weights": {"ds": 1}}]}
    chapters |= {"mixing": {"global_batch_size": 2}}
    (folder / "chapters.yaml").write_text(yaml.safe_dump(CONFIG | chapters))
    for suffix, mark in ((".csv", ";"), (".tsv", "\t")):
        table = f"id{mark}text\n1{mark}a text\n"
        (folder / "rows").with_suffix(suffix).write_text(table)
    packing = Packing(**CONFIG["packing"])
    loader = PackedDataLoader(PackedStreamingDataset(local=folder / "ds", packing=packing))
    contents = {"empty": {}, "list": [], "stats": loader.stats()}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def call(prepared, tmp_path, monkeypatch, capfd):
    """Call a command line in a copy of the folder; return its exit code and its errors."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")

    def _call(command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", shlex.split(f"streampack {command}"))
        capfd.readouterr()
        code = 0
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capfd.readouterr().err

    return _call


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("command", "says", "following"), MISUSES)
def test_misuse_is_answered_with_a_way_out_that_works(command, says, following, call):
    code, answer = call(command)

    assert code in (2, 4)
    assert re.search(says, answer), answer
    assert answer.count("\n") == 1
    assert call(following)[0] == 0
