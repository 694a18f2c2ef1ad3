"""Misuse of every verb: the answer is in the words of the command line, and names a way that works.

::

    $ streampack write rows.csv --tokenizer tok.json --out o
    error: rows.csv, row 0: no column 'text'; it has 'body', 'n'; set --text to one of them
    $ streampack write rows.csv --tokenizer tok.json --out o --text body

Each row runs the misuse, and then the command of a user who does what the answer says.
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
from streampack.write import RowFormat, WriteOptions, write_stream, write_texts
from tests.helpers.inputs import write_table
from tests.helpers.words import words

CONFIG = {"streams": [{"local": "ds"}], "packing": {"max_seq_len": 16}, "batch_size": 2}
NO_JOB = "holds no job.json; name the folder that `streampack write` wrote to"
NO_STREAM = "does not exist; .*`streampack write` makes a stream of text, rows or token ids"
HELP = r"Try 'streampack {verb} --help' for help"


@dataclass(frozen=True)
class Misuse:
    """A command with a mistake."""

    command: str
    """After `streampack`; starts with the verb."""
    says: str
    """A regular expression that the answer matches, with the way out."""
    next: str
    """The command of a user who follows it."""
    edit: tuple[str, str] = ("", "")
    """A text of the config, and what the answer says to write instead."""


WRITE = (
    Misuse(
        "write nope.txt --tokenizer tok.json --out o",
        "nope.txt: does not exist; check the path",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.tx --out o --tokenizer tok.json",
        "does not exist; check the path",
        "write a.txt --out o --tokenizer tok.json",
    ),
    Misuse(
        "write 'z*.parquet' --out o", "0 files; check the pattern", "write 't*.parquet' --out o"
    ),
    Misuse("write empty --out o", "0 files in this folder; name one", "write tables --out o"),
    Misuse(
        "write x.yaml --out o",
        r"is not a supported file; supported are .*\.parquet.* or leave it out",
        "write tokens.parquet --out o",
    ),
    Misuse(
        "write a.txt --out o",
        "is text; set --tokenizer to a tokenizer.json",
        "write a.txt --out o --tokenizer tok.json",
    ),
    Misuse(
        "write a.txt --tokenizer no.json --out o",
        r"--tokenizer no.json cannot be loaded .*; give a tokenizer.json",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer a.txt --out o",
        r"--tokenizer a.txt cannot be loaded .*; give a tokenizer.json",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.jsonl --tokenizer tok.json --out o",
        "no column 'text'; it has 'body', 'n'; set --text to one of them",
        "write rows.jsonl --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.csv --tokenizer tok.json --out o",
        "no column 'text'; it has 'body', 'n'; set --text to one of them",
        "write rows.csv --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write rows.parquet --tokenizer tok.json --out o",
        "no column 'text'; it has 'body', 'n'; set --text to one of them",
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
        "no column 'tokens'; .* for text, set --tokenizer and --text",
        "write rows.parquet --text body --tokenizer tok.json --out o",
    ),
    Misuse(
        "write ids.jsonl --out o",
        "no column 'tokens'; it has 'ids'; set --tokens to one of them",
        "write ids.jsonl --tokens ids --out o",
    ),
    Misuse(
        "write ids.jsonl --tokens id --out o",
        "did you mean 'ids'",
        "write ids.jsonl --tokens ids --out o",
    ),
    Misuse(
        "write ids.jsonl --tokenizer tok.json --text ids --out o",
        "column 'ids' is a list of 2, but must be text; leave out --tokenizer if it holds token",
        "write ids.jsonl --tokens ids --out o",
    ),
    Misuse(
        "write tokens.parquet --text tokens --tokenizer tok.json --out o",
        "column 'tokens' is a list of 2, but must be text; leave out --tokenizer",
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
        "leaves no row to skip; set --max-bad-rows 1000, or leave out --on-bad-row",
        "write bad.jsonl --tokenizer tok.json --out o --on-bad-row skip --max-bad-rows 1000",
    ),
    Misuse(
        "write array.json --tokenizer tok.json --out o",
        r"make lines of it: datasets.Dataset.from_json\('\S*array.json'\).to_json\('rows.jsonl'\)",
        'python -c "import datasets; '
        "datasets.Dataset.from_json('array.json').to_json('rows.jsonl')\"",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out full",
        "--out full exists already .*; remove it, or name another",
        "write a.txt --tokenizer tok.json --out full-2",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out gs://b/c",
        "is neither a folder nor s3://bucket/path; name a folder, then upload it",
        "write a.txt --tokenizer tok.json --out c",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --compression zst",
        "did you mean 'zstd'",
        "write a.txt --tokenizer tok.json --out o --compression zstd",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --part-bytes 2xb",
        "--part-bytes 2xb is not a number of bytes; write 500000000, '500mb'",
        "write a.txt --tokenizer tok.json --out o --part-bytes 500mb",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --size-limit 1",
        "leaves no room .*; set a size such as '64mb'",
        "write a.txt --tokenizer tok.json --out o --size-limit 64mb",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --workers 0",
        "--workers 0 must be 1 or more; leave it out for one process per core",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --engine spark",
        r"--engine spark is not one of processes\|ray",
        "write a.txt --tokenizer tok.json --out o --engine processes",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --on-bad-row ignore",
        r"is not one of error\|skip",
        "write a.txt --tokenizer tok.json --out o --on-bad-row skip",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --max-bad-rows -1",
        "must be 0 or more; set it to the number of rows that may be left out",
        "write a.txt --tokenizer tok.json --out o --max-bad-rows 2",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --part 3/2",
        "is not K/N with K from 1 to N, .*; leave out --part to write all parts here",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --tokens-dtype int3",
        "did you mean 'int32'",
        "write a.txt --tokenizer tok.json --out o --tokens-dtype int32",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --tokens-dtype float32",
        r"is not one of int8\|int16",
        "write a.txt --tokenizer tok.json --out o --tokens-dtype int16",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out o --append",
        "so --append has nothing to add to; leave it out",
        "write a.txt --tokenizer tok.json --out o",
    ),
    Misuse(
        "write 'texts/*.txt' --tokenizer tok.json --out o --workers 0",
        "--workers 0 must be 1 or more; leave it out for one process per core",
        "write 'texts/*.txt' --tokenizer tok.json --out o",
    ),
    Misuse(
        "write 'texts/*.txt' --out o",
        "set --tokenizer",
        "write 'texts/*.txt' --out o --tokenizer tok.json",
    ),
    Misuse(
        "write a.txt --tokenizer tok.json --out above/ds",
        "exists already and is not empty, .*; remove it, or name another",
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
    Misuse("merge nope", f"PATH nope {NO_JOB}", "merge job"),
    Misuse("merge ds", f"PATH ds {NO_JOB}", "merge job"),
    Misuse("index dss", "holds no index.json, nor does a subfolder; give an MDS", "index ds"),
    Misuse(
        "index tokens.parquet",
        "holds no index.json, .* `streampack write` makes one of text, rows or token ids",
        "write tokens.parquet --out tokens",
    ),
    Misuse("index ids", "set --tokens to 'ids'", "index ids --tokens ids"),
    Misuse("index ids --tokens idz", "did you mean 'ids'", "index ids --tokens ids"),
    Misuse(
        "index wide --tokens-dtype int32",
        "set --tokens-dtype int64, or, if int32 is right, --no-check-dtypes$",
        "index wide --tokens-dtype int64",
    ),
    Misuse(
        "inspect wide --tokens-dtype int32",
        "set --tokens-dtype int64, or, if int32 is right, --no-check-dtypes$",
        "inspect wide --tokens-dtype int32 --no-check-dtypes",
    ),
    Misuse("index ds --keep-local", "--keep-local is for one remote stream", "index ds"),
    Misuse("inspect dss", "does not exist; give the folder of an MDS stream", "inspect ds"),
    Misuse("inspect tokens.parquet", NO_STREAM, "write tokens.parquet --out tokens"),
    Misuse("inspect a.txt", NO_STREAM, "write a.txt --tokenizer tok.json --out a"),
    Misuse("inspect texts", NO_STREAM, "write texts --tokenizer tok.json --out texts-2"),
    Misuse("inspect above", "does not exist; set --split ds", "inspect above --split ds"),
    Misuse("inspect ids", "set --tokens to 'ids'", "inspect ids --tokens ids"),
    Misuse(
        "inspect ds --tokenizer none.json",
        r"cannot be loaded .*; give a tokenizer.json",
        "inspect ds --tokenizer tok.json",
    ),
    Misuse(
        "inspect ds --split train",
        "does not exist; leave out --split train, as ds has an index.json",
        "inspect ds",
    ),
    Misuse("inspect ds --pack 0", "Invalid value for '--pack'", "inspect --help"),
    Misuse("inspect", "Missing argument", "inspect --help"),
    Misuse(
        "compare-packers --stream nope --samples 9",
        "does not exist; give the folder of an MDS stream",
        "compare-packers --stream ds --samples 9",
    ),
    Misuse("compare-packers --stream a.txt", NO_STREAM, "write a.txt --tokenizer tok.json --out a"),
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
    Misuse("run runs.yaml", "cannot be read .*; name a YAML file", "run run.yaml"),
    Misuse("run ds", "cannot be read .*; name a YAML file", "run run.yaml"),
    Misuse("run tokens.parquet", "is not YAML: .*; fix it, or name a YAML file", "run run.yaml"),
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
    Misuse("run parquet.yaml", NO_STREAM, "write tokens.parquet --out tokens"),
    Misuse(
        "run column.yaml",
        "set tokens: to 'ids'",
        "simulate column.yaml",
        ("local: ids", "local: ids\n  tokens: ids"),
    ),
    Misuse("run broken.yaml", "is not YAML: .*; fix it", "simulate broken.yaml", ("[1", "")),
    Misuse("run run.yaml --steps 0", "Invalid value for '--steps'", "run --help"),
    Misuse("run run.yaml --worker 2", r"No such option: --worker", "run --help"),
    Misuse("plan run.yaml", "use `streampack simulate`", "simulate run.yaml"),
    Misuse("plan chapter.yaml", "cannot be read .*; name a YAML file", "plan chapters.yaml"),
    Misuse(
        "plan chapters.yaml --state nope.json",
        r"cannot be read .*; name a file with the JSON of loader.state_dict\(\)",
        "plan chapters.yaml",
    ),
    Misuse("simulate ds", "cannot be read .*; name a YAML file", "simulate run.yaml"),
    Misuse(
        "simulate run.yaml --ranks 3 --ranks-per-node 2",
        "--ranks 3 is not a multiple of --ranks-per-node 2",
        "simulate run.yaml --ranks 4 --ranks-per-node 2",
    ),
    Misuse(
        "simulate unknown.yaml",
        "did you mean 'batch_size'",
        "simulate unknown.yaml",
        ("batchsize: 3\n", ""),
    ),
    Misuse(
        "demo --config unknown.yaml",
        "did you mean 'batch_size'",
        "simulate unknown.yaml",
        ("batchsize: 3\n", ""),
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
    with MDSWriter(out=str(folder / "wide"), columns={"tokens": "bytes"}) as writer:
        for number in range(50):
            writer.write({"tokens": np.arange(number, number + 40, dtype=np.int64).tobytes()})
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
    (folder / "tables").mkdir()
    shutil.copy(folder / "tokens.parquet", folder / "tables")
    rows = RowFormat(tokenizer=folder / "tok.json")
    write_texts([folder / "a.txt"], folder / "job", WriteOptions(rows=rows, num_processes=1))
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


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("case", [*WRITE, *STREAMS, *RUNS], ids=lambda case: case.command)
def test_misuse_is_answered_with_a_way_out_that_works(case, call):
    code, answer = call(f"streampack {case.command}")

    assert code in (2, 4)
    assert re.search(case.says, answer), answer
    assert "Traceback" not in answer
    assert not re.search(r"\b(?:num_processes|text_field|tokens_field|extra_fields)=", answer)
    if case.next.endswith("--help"):
        assert f"Try 'streampack {case.next}' for help" in answer
    else:
        assert answer.count("\n") == 1, "one line"
    if case.edit != ("", ""):
        config = Path(case.command.split()[-1])
        assert case.edit[0] in config.read_text()
        config.write_text(config.read_text().replace(*case.edit))
    is_other = case.next.startswith("python ")
    code, answer = call(case.next if is_other else f"streampack {case.next}")
    assert code == 0, answer


@pytest.mark.parametrize("separator", [";", "|", "\t"])
def test_a_csv_with_another_separator_is_no_column_of_whole_lines(call, separator):
    Path("other.csv").write_text(f"n{separator}text\n1{separator}hello\n")
    command = "streampack write other.csv --tokenizer tok.json --out o"

    code, answer = call(f"{command} --on-bad-row skip")

    assert code == 2
    assert f"line 1 names one column, {f'n{separator}text'!r}" in answer
    assert "rename it if it has tabs, or write it with commas" in answer
    if separator == "\t":
        Path("other.csv").rename("other.tsv")
    else:
        Path("other.csv").write_text("n,text\n1,hello\n")
    right = command.replace(".csv", ".tsv") if separator == "\t" else command
    assert call(right)[0] == 0


def test_rows_of_another_job_are_not_added_to_its_stream_unasked(call):
    assert call("streampack write a.txt --tokenizer tok.json --out o")[0] == 0
    code, answer = call("streampack write texts --tokenizer tok.json --out o")
    assert code == 2
    assert re.search(r"--out o .*name another", answer), answer


def test_every_verb_has_misuse():
    assert {case.command.split()[0] for case in (*WRITE, *STREAMS, *RUNS)} >= VERBS.keys()
