"""Misuse of every verb: the answer names a way out that works, and fits Python and YAML too.

::

    $ streampack write rows.csv --tokenizer tok.json --out o
    error: rows.csv, row 0: no column 'text'; it has 'body', 'n'; set text= to one of them
    $ streampack write rows.csv --tokenizer tok.json --out o --text=body

Each row runs the wrong command, and then that of a user who follows the advice.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from streampack.cli import app
from streampack.cli.verbs import VERBS
from streampack.write import write_stream
from tests.helpers.inputs import write_table
from tests.helpers.words import words

CONFIG = {"streams": [{"local": "ds"}], "packing": {"max_seq_len": 16}, "batch_size": 2}
NO_STREAM = "does not exist; .*`streampack write` makes a stream of text, rows or token ids"
TEXT = "write a.txt --tokenizer tok.json --out o"
# The wrong command, the answer, and the command of a user who follows its advice.
MISUSES = (
    ("write a.txt --out o", "is text; set tokenizer= to a tokenizer.json", TEXT),
    (
        "write rows.parquet --tokenizer tok.json --out o",
        "no column 'text'; it has 'body', 'n'; set text= to one of them",
        "write rows.parquet --tokenizer tok.json --out o --text=body",
    ),
    (
        "write bad.jsonl --tokenizer tok.json --out o",
        "row 1: not valid JSON.*set on_bad_row='skip'",
        "write bad.jsonl --tokenizer tok.json --out o --on_bad_row='skip'",
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
    ("index ids", "set tokens= to 'ids'", "index ids --tokens='ids'"),
    ("inspect a.txt", NO_STREAM, "write a.txt --tokenizer tok.json --out a"),
    ("inspect above", "does not exist; set split='ds'", "inspect above --split='ds'"),
    (
        "simulate run.yaml --num-ranks 3 --ranks-per-node 2",
        "num_ranks=3 is not a multiple of ranks_per_node=2",
        "simulate run.yaml --num_ranks=4 --ranks_per_node=2",
    ),
    ("plan run.yaml", "use `streampack simulate`", "simulate run.yaml"),
)
# A wrong config, the answer, and the user's change.
MISTAKES = (
    (
        "batchsize: 3",
        "batchsize: unknown key .*did you mean 'batch_size'",
        ("batchsize", "batch_size"),
    ),
    ("x: [1", "is not YAML: .*; fix it", ("x: [1", "")),
    ("streams: [{local: ids}]", "set tokens= to 'ids'", ("ids}", "ids, tokens: ids}")),
    ("streams: [{local: nope}]", "give the folder .* as local=", ("nope", "ds")),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder of streams, files of rows and a config."""
    folder = tmp_path_factory.mktemp("misuse")
    words().save(str(folder / "tok.json"))
    write_stream([[1, 2, 3]] * 50, folder / "ds")
    write_stream([[1, 2, 3]] * 50, folder / "above" / "ds")
    write_stream([{"ids": np.array([1, 2, 3], np.int32)}] * 50, folder / "ids", tokens="ids")
    write_table(folder / "rows.parquet", pa.table({"body": ["a text", "more"], "n": [1, 2]}), 9)
    (folder / "a.txt").write_text("a text")
    (folder / "bad.jsonl").write_text('{"text": "a text"}\n{"text"\n')
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
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


@pytest.mark.parametrize(("wrong", "says", "change"), MISTAKES)
def test_a_mistake_in_a_config_is_answered_with_a_way_out_that_works(wrong, says, change, call):
    rest = {key: value for key, value in CONFIG.items() if not wrong.startswith(key)}
    config = Path("run.yaml")
    config.write_text(f"{yaml.safe_dump(rest)}{wrong}\n".replace("batch_size: 2\n", ""))

    code, answer = call("simulate run.yaml")

    assert code == 2
    assert re.search(says, answer), answer
    config.write_text(config.read_text().replace(*change))
    assert call("simulate run.yaml") == (0, "")
    assert "Traceback" not in answer


# Unknown options of `migrate` are those of the program that it reads.
@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"migrate"}))
def test_an_unknown_option_of_any_verb_is_named_with_the_help_page(verb, call):
    code, answer = call(f"{verb} --nope")

    assert code == 2
    assert f"Try 'streampack {verb} --help' for help" in answer
