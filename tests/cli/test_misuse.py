"""Misuse of every verb: the answer is in the words of the command line, and its command works.

::

    $ streampack inspect rows.parquet
    error: rows.parquet/index.json: does not exist; ...
    try: streampack write rows.parquet --text body --tokenizer tok.json --out rows

Each row runs the misuse, and then the command that the answer names.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from streampack.cli import app
from streampack.cli.verbs import VERBS
from streampack.mds.mosaic import MDSWriter
from streampack.write import write_stream
from tests.helpers.inputs import write_table
from tests.helpers.words import words

CONFIG = {"streams": [{"local": "ds"}], "packing": {"max_seq_len": 16}, "batch_size": 2}
HELP = r"Try 'streampack {verb} --help' for help"


@dataclass(frozen=True)
class Misuse:
    """A command with a mistake."""

    command: str
    """After `streampack`; starts with the verb."""
    says: str
    """A regular expression that the answer matches."""
    next: str
    """The command that it names."""
    edit: tuple[str, str] = ("", "")
    """A text of the config, and what the answer says to write instead."""


WRITE = (
    Misuse("write nope.txt --out o", "nope.txt: does not exist", "ls ."),
    Misuse(
        "write a.tx --out o --tokenizer tok.json",
        "does not exist",
        "write a.txt --out o --tokenizer tok.json",
    ),
    Misuse("write none/a.jsonl --out o", "does not exist", "ls ."),
    Misuse("write 'z*.txt' --out o", "matches 0 files", "ls ."),
    Misuse("write empty --out o", "0 files", "ls ."),
    Misuse("write x.yaml --out o", "is not a supported file", "ls ."),
    Misuse("write ds --out o", "is not a supported file", "inspect ds"),
    Misuse(
        "write a.txt --out o",
        "is text; set --tokenizer",
        "write a.txt --out o --tokenizer tok.json",
    ),
    Misuse(
        "write a.txt --tokenizer no.json --out o",
        "--tokenizer no.json cannot be loaded",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer a.txt --out o",
        "--tokenizer a.txt cannot be loaded",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.jsonl --tokenizer tok.json --out o",
        "no column 'text'; it has 'body', 'n'; set --text",
        "write rows.jsonl --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.csv --tokenizer tok.json --out o",
        "no column 'text'",
        "write rows.csv --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.parquet --tokenizer tok.json --out o",
        "no column 'text'",
        "write rows.parquet --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.arrow --text bod --tokenizer tok.json --out o",
        "did you mean 'body'",
        "write rows.arrow --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.parquet --text n --tokenizer tok.json --out o",
        "column 'n' is of type int, but must be text; name another column with --text",
        "write rows.parquet --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.parquet --out o",
        "no column 'tokens'",
        "write rows.parquet --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write ids.jsonl --out o",
        "no column 'tokens'; it has 'ids'; set --tokens",
        "write ids.jsonl --tokens ids --out o",
    ),
    Misuse(
        "write ids.jsonl --tokens id --out o",
        "did you mean 'ids'",
        "write ids.jsonl --tokens ids --out o",
    ),
    Misuse(
        "write ids.jsonl --tokenizer tok.json --out o",
        "no column 'text'",
        "write ids.jsonl --tokens ids --out o",
    ),
    Misuse(
        "write tokens.parquet --text tokens --tokenizer tok.json --out o",
        "column 'tokens'",
        "write tokens.parquet --out o",
    ),
    Misuse(
        "write a.txt --columns url --tokenizer tok.json --out o",
        "has no column 'url'; leave out --columns",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write bad.jsonl --tokenizer tok.json --out o",
        "row 1: not valid JSON.*set --on-bad-row skip",
        "write bad.jsonl --tokenizer tok.json --out o --on-bad-row skip",
    ),
    Misuse(
        "write bad.jsonl --tokenizer tok.json --out o --on-bad-row skip --max-bad-rows 0",
        "--max-bad-rows 0 leaves no row to skip",
        "write bad.jsonl --tokenizer tok.json --out o --on-bad-row skip --max-bad-rows 1000",
    ),
    Misuse(
        "write array.json --tokenizer tok.json --out o",
        "is one JSON array",
        'python -c "import datasets; '
        "datasets.Dataset.from_json('array.json').to_json('rows.jsonl')\"",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out full",
        "--out full exists already",
        "write a.txt --tokenizer tok.json --out full-2",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out gs://b/c",
        "is neither a folder nor s3://",
        "write a.txt --tokenizer tok.json --out c",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --compression zst",
        "did you mean 'zstd'",
        "write a.txt --tokenizer tok.json --out o --compression zstd",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --part-bytes 2xb",
        "--part-bytes 2xb is not",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --size-limit 1",
        "leaves no room",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --workers 0",
        "--workers 0 must be 1 or more",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --engine spark",
        "--engine spark is not one of",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --on-bad-row ignore",
        "is not one of error|skip",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --max-bad-rows -1",
        "must be 0 or more",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --part 3/2",
        "is not K/N with K from 1 to N",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --tokens-dtype int3",
        "did you mean 'int32'",
        "write a.txt --tokenizer tok.json --out o --tokens-dtype int32",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --tokens-dtype float32",
        "is not one of",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --append",
        "so --append has nothing to add to; leave it out",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write 'texts/*.txt' --tokenizer tok.json --out o --workers 0",
        "--workers 0 must be 1 or more",
        "write 'texts/*.txt' --tokenizer tok.json --out o",
    ),
    Misuse(
        "write 'texts/*.txt' --out o",
        "set --tokenizer",
        "write 'texts/*.txt' --out o --tokenizer tok.json",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out above/ds",
        "exists already and is not empty",
        "write a.txt --tokenizer tok.json --out above/ds-2",
    ),
    Misuse("write a.txt", r"Missing option '--out'[^$]*", "write --help"),
    Misuse("write", HELP.format(verb="write"), "write --help"),
    Misuse(
        "write ids.jsonl --token ids --out o",
        r"No such option: --token \(Possible options: .*--tokens",
        "write --help",
    ),
)
STREAMS = (
    Misuse("merge nope", "PATH nope holds no job.json", "ls ."),
    Misuse("merge ds", "holds no job.json", "inspect ds"),
    Misuse("merge tokens.parquet", "holds no job.json", "write tokens.parquet --out tokens"),
    Misuse("index nope", "holds no index.json", "ls ."),
    Misuse("index dss", "holds no index.json", "index ds"),
    Misuse(
        "index rows.parquet",
        "holds no index.json",
        "write rows.parquet --text body --tokenizer tok.json --out rows",
    ),
    Misuse("index empty", "holds no index.json", "ls ."),
    Misuse("index ids", "set --tokens to 'ids'", "index ids --tokens ids"),
    Misuse("index ids --tokens idz", "did you mean 'ids'", "index ids --tokens ids"),
    Misuse("index ds --keep-local", "--keep-local is for one remote stream", "index ds"),
    Misuse("inspect nope", "does not exist", "ls ."),
    Misuse("inspect dss", "does not exist", "inspect ds"),
    Misuse("inspect tokens.parquet", "does not exist", "write tokens.parquet --out tokens"),
    Misuse("inspect a.txt", "does not exist", "write a.txt --tokenizer tok.json --out a"),
    Misuse("inspect texts", "does not exist", "write texts --tokenizer tok.json --out texts-2"),
    Misuse("inspect above", "does not exist", "inspect above/ds"),
    Misuse("inspect empty", "does not exist", "ls ."),
    Misuse("inspect ids", "set --tokens to 'ids'", "inspect ids --tokens ids"),
    Misuse(
        "inspect ds --tokenizer none.json", "cannot be loaded", "inspect ds --tokenizer tok.json"
    ),
    Misuse("inspect ds --split train", "ds/train/index.json: does not exist", "inspect ds"),
    Misuse("inspect ds --pack 0", "Invalid value for '--pack'", "inspect --help"),
    Misuse("inspect", "Missing argument", "inspect --help"),
    Misuse("compare-packers --stream nope --samples 9", "does not exist", "ls ."),
    Misuse(
        "compare-packers --stream a.txt",
        "does not exist",
        "write a.txt --tokenizer tok.json --out a",
    ),
    Misuse(
        "compare-packers --samples 9 --kind webb",
        "did you mean 'web'",
        "compare-packers --samples 9 --kind web",
    ),
    Misuse(
        "compare-packers --samples 9 --stream ids",
        "set --tokens to 'ids'",
        "compare-packers --samples 9 --stream ids --tokens ids",
    ),
    Misuse(
        "compare-packers --max-seq-len 4",
        "Invalid value for '--max-seq-len'",
        "compare-packers --help",
    ),
)
RUNS = (
    Misuse("run nope.yml", "cannot be read", "ls ."),
    Misuse("run runs.yaml", "cannot be read", "run run.yaml"),
    Misuse("run ds", "name a YAML file", "inspect ds"),
    Misuse("run tokens.parquet", "is not YAML", "write tokens.parquet --out tokens"),
    Misuse(
        "run unknown.yaml",
        "batchsize: unknown key .*did you mean 'batch_size'",
        "simulate unknown.yaml",
        ("batchsize: 3\n", ""),
    ),
    Misuse(
        "run nostream.yaml",
        "nope/index.json: does not exist; give the folder .* as local:",
        "simulate nostream.yaml",
        ("local: nope", "local: ds"),
    ),
    Misuse("run parquet.yaml", "does not exist", "write tokens.parquet --out tokens"),
    Misuse(
        "run column.yaml",
        "set tokens: to 'ids'",
        "simulate column.yaml",
        ("local: ids", "local: ids\n  tokens: ids"),
    ),
    Misuse("run broken.yaml", "is not YAML", "simulate broken.yaml", ("[1", "")),
    Misuse("run run.yaml --steps 0", "Invalid value for '--steps'", "run --help"),
    Misuse("run run.yaml --worker 2", r"No such option: --worker", "run --help"),
    Misuse("plan run.yaml", "the config has no chapters", "simulate run.yaml"),
    Misuse("plan chapter.yaml", "cannot be read", "plan chapters.yaml"),
    Misuse("plan chapters.yaml --state nope.json", "cannot be read", "ls ."),
    Misuse("plan ds", "name a YAML file", "inspect ds"),
    Misuse("simulate runs.yaml", "cannot be read", "simulate run.yaml"),
    Misuse("simulate ds", "name a YAML file", "inspect ds"),
    Misuse(
        "simulate run.yaml --ranks 3 --ranks-per-node 2",
        "--ranks 3 is not a multiple of --ranks-per-node 2",
        "simulate run.yaml --ranks 3",
    ),
    Misuse("simulate unknown.yaml", "unknown key", "simulate unknown.yaml", ("batchsize: 3\n", "")),
    Misuse("demo --config nope.yml", "cannot be read", "ls ."),
    Misuse(
        "demo --config unknown.yaml", "unknown key", "simulate unknown.yaml", ("batchsize: 3\n", "")
    ),
    Misuse("demo --steps 1", "Invalid value for '--steps'", "demo --help"),
    Misuse("wrte a.txt", "Did you mean 'write'", "--help"),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder of streams, files of rows and configs."""
    folder = tmp_path_factory.mktemp("misuse")
    words().save(str(folder / "tok.json"))
    write_stream([[1, 2, 3]] * 50, folder / "ds")
    write_stream([[1, 2, 3]] * 50, folder / "above" / "ds")
    write_stream([{"ids": np.array([1, 2, 3], np.int32)}] * 50, folder / "ids", column="ids")
    rows = {"body": ["a text", "more"], "n": [1, 2]}
    for suffix in ("parquet", "arrow"):
        write_table(folder / f"rows.{suffix}", pa.table(rows), 9)
    write_table(folder / "tokens.parquet", pa.table({"tokens": [[1, 2], [3]]}), 9)
    texts = {
        "a.txt": "a text",
        "texts/a.txt": "a text",
        "x.yaml": "a: 1",
        "rows.csv": "body,n\na text,1\n",
        "rows.jsonl": '{"body": "a text", "n": 1}\n',
        "ids.jsonl": '{"ids": [1, 2]}\n',
        "bad.jsonl": '{"text": "a text"}\n{"text"\n',
        "array.json": '[{"text": "a text"}]',
        "full/file": "x",
        "broken.yaml": f"{yaml.safe_dump(CONFIG)}[1",
    }
    configs = {
        "run": {},
        "unknown": {"batchsize": 3},
        "nostream": {"streams": [{"local": "nope"}]},
        "parquet": {"streams": [{"local": "tokens.parquet"}]},
        "column": {"streams": [{"local": "ids"}]},
        "chapters": {
            "mixing": {"global_batch_size": 2},
            "chapters": [{"weights": {"ds": 1.0}, "until": 64}, {"weights": {"ds": 1.0}}],
        },
    }
    texts |= {f"{name}.yaml": yaml.safe_dump(CONFIG | config) for name, config in configs.items()}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def call(prepared, tmp_path, monkeypatch, capfd):
    """Call a command line in a copy of the folder; return its exit code and its errors."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "300")

    def _call(command: str) -> tuple[int, str]:
        arguments = shlex.split(command)
        if arguments[0] != "streampack":
            arguments[0] = {"python": sys.executable}.get(arguments[0], arguments[0])
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
            return done.returncode, done.stderr
        monkeypatch.setattr(sys, "argv", arguments)
        capfd.readouterr()
        code = 0
        try:
            app.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capfd.readouterr().err

    return _call


def named(answer: str) -> str:
    """Return the command that an answer names."""
    found = re.search(r"(?m)^(?:after the edit, )?try: (.*)$", answer)
    if found is None:
        found = re.search(r"Try '(streampack.*?)' for help", answer)
    assert found, answer
    return found[1]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("case", [*WRITE, *STREAMS, *RUNS], ids=lambda case: case.command)
def test_misuse_names_a_command_that_works(case, call):
    code, answer = call(f"streampack {case.command}")

    assert code in (2, 4)
    assert re.search(case.says, answer), answer
    assert "Traceback" not in answer
    assert not re.search(r"\b(?:num_processes|text_field|tokens_field|extra_fields)=", answer)
    command = named(answer)
    is_other = case.next.startswith(("ls ", "python "))
    assert shlex.split(command) == shlex.split(case.next if is_other else f"streampack {case.next}")
    if case.edit != ("", ""):
        assert "after the edit, try: " in answer
        config = Path(case.command.split()[-1])
        assert case.edit[0] in config.read_text()
        config.write_text(config.read_text().replace(*case.edit))
    code, answer = call(command)
    assert code == 0, answer


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("write a.txt --tokenizer gpt2 --out o", "there is no gpt2"),
        ("write rows.jsonl --text body --columns urk --tokenizer tok.json --out o", "no column 'u"),
        ("index raw", "--tokens-dtype to what"),
        ("inspect cut.arrow", "cut.arrow/index.json: does not exist"),
    ],
)
def test_no_command_is_named_that_fails_again_or_changes_what_was_asked(call, command, says):
    with MDSWriter(out="raw", columns={"tokens": "bytes"}) as writer:
        for _ in range(9):
            writer.write({"tokens": b"\1\0\2\0"})
    Path("cut.arrow").write_bytes(b"ARROW1\0\0" + Path("rows.arrow").read_bytes()[:300])
    code, answer = call(f"streampack {command}")
    assert code in (2, 4)
    assert says in answer
    assert "try:" not in answer


def test_rows_of_another_job_are_not_added_to_its_stream_unasked(call):
    assert call("streampack write a.txt --tokenizer tok.json --out o")[0] == 0
    code, answer = call("streampack write texts --tokenizer tok.json --out o")
    assert code == 2
    assert named(answer) == "streampack write texts --tokenizer tok.json --out o-2"
    assert call(named(answer))[0] == 0


def test_every_verb_has_misuse():
    assert {case.command.split()[0] for case in (*WRITE, *STREAMS, *RUNS)} >= VERBS.keys()
