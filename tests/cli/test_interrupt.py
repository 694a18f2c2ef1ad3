"""Ctrl-C and full disks: one line, the exit code, and no incomplete file with a final name."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from streampack import PackedStreamingDataset, Packing, Stream
from streampack.mds.length_file import LENGTH_FILE
from streampack.report import write_report
from streampack.write import write_stream

INTERRUPTED = 130
ENDS = {signal.SIGINT: ("interrupted", INTERRUPTED), signal.SIGTERM: ("terminated", 143)}


def interrupt(command, seen, *, number=signal.SIGINT, timeout_s=120.0):
    """Press Ctrl-C once a file appears, which signals every process of the terminal.

    A SIGTERM is only sent to the main process, as a scheduler may do.

    Returns:
        The exit code, what was printed to stdout and to stderr.
    """
    main = "import sys; from streampack.cli import main; sys.argv[0] = 'streampack'; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", main, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Shells and CI start background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + timeout_s
        while not seen() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.fixture
def texts(tmp_path):
    """A file of rows that would take ten seconds to encode, and a tokenizer."""
    rows = tmp_path / "rows.jsonl"
    line = '{"text": "' + "a b c d e f g h " * 200 + '"}\n'
    rows.write_text(line * 10_000)
    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, " ": 1, "b": 2}, [], unk_token="a")).save(str(tokenizer))
    return rows, tokenizer


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGINT, 1),
        (signal.SIGINT, 2),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        (signal.SIGTERM, 2),
    ],
)
def test_an_interrupted_write_says_so_and_keeps_finished_parts(tmp_path, texts, processes, number):
    rows, tokenizer = texts
    out = tmp_path / "streams" / "mine"
    command = ["write", rows, "--out", out, "--tokenizer", tokenizer, "--num-workers", processes]

    def writes():
        return any(out.glob("parts/*/part.json"))

    code, said, error = interrupt([*command, "--part-bytes", "2mb"], writes, number=number)

    parts = json.loads((out / "job.json").read_text())["parts"]
    done = list(out.glob("parts/*/part.json"))
    word, expected = ENDS[number]
    assert said == ""
    # A worker may have finished a part without getting to report it.
    expected_lines = [
        f"{word}: {out}: {num} of {len(parts)} parts are done and kept; run the same command again "
        "for the others"
        for num in range(len(done) - processes, len(done) + 1)
    ]
    assert error.splitlines()[0] in expected_lines
    assert len(error.splitlines()) == 1
    assert code == expected
    assert not (out / "index.json").exists()
    if processes == 1:  # a worker is killed, and the commit removes its leftovers
        assert not list(out.rglob(".*.partial"))


def test_any_other_verb_is_interrupted_in_one_line(tmp_path):
    # The verb waits for a config that never comes.
    config = tmp_path / "run.yaml"
    os.mkfifo(config)
    opened = []

    def is_read():
        if opened:
            time.sleep(0.5)  # a signal just before read() would only be noticed after it
            return True
        with suppress(OSError):  # the command has not opened it yet
            opened.append(os.open(config, os.O_WRONLY | os.O_NONBLOCK))
        return False

    try:
        code, said, error = interrupt(["run", config], is_read)
    finally:
        for descriptor in opened:
            os.close(descriptor)

    assert opened
    assert (code, said, error.splitlines()) == (INTERRUPTED, "", ["interrupted"])


NUM_SAMPLES = 3000


def run(*arguments: object, most_bytes: int | None = None, stdout: str | None = None):
    """Run a verb with a limit on the size of files, which acts like a full disk."""
    out = subprocess.PIPE if stdout is None else os.open(stdout, os.O_WRONLY)

    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    try:
        return subprocess.run(
            [sys.executable, "-m", "streampack", *map(str, arguments)],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=limit,
            # Python itself would keep truncated bytecode; without a limit it may keep its own.
            env={**os.environ, **({"PYTHONDONTWRITEBYTECODE": "1"} if most_bytes else {})},
        )
    finally:
        if stdout is not None:
            os.close(out)


def assert_one_line(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "kernels are" not in line]
    assert lines[-1].startswith("error: ")
    assert "free space there, or write elsewhere" in lines[-1]
    assert "Traceback" not in done.stderr


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = (json.dumps({"tokens": [n % 99, *range(40)]}) for n in range(NUM_SAMPLES))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_write_on_a_full_disk_is_one_line_and_goes_on_once_there_is_room(rows, tmp_path, workers):
    out = tmp_path / "out"
    arguments = ("write", rows, "--out", out, "--compression", "none", "--size-limit", "50kb")
    arguments += ("--part-bytes", "100kb", "--num-workers", workers)
    assert_one_line(run(*arguments, most_bytes=20_000))
    assert not list(out.rglob("part.json"))
    assert not list(out.rglob("shard*"))
    # A worker that is terminated leaves its file for the next run to remove.
    assert workers > 1 or not list(out.rglob(".*.partial"))
    assert run(*arguments).returncode == 0  # the way out: free some space
    assert (out / "index.json").is_file()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_write_where_it_may_not_is_one_line(rows, tmp_path):
    (tmp_path / "out").mkdir(mode=0o500)
    done = run("write", rows, "--out", tmp_path / "out" / "s")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("or name a place that you may use")


@pytest.mark.slow
def test_index_on_a_full_disk_is_one_line_and_leaves_no_length_file(tmp_path):
    out = tmp_path / "stream"
    write_stream((np.arange(9) for _ in range(NUM_SAMPLES)), out, size_limit=2**14)
    (out / LENGTH_FILE).unlink()
    before = sorted(path.name for path in out.iterdir())
    assert_one_line(run("index", out, most_bytes=20_000))
    assert sorted(path.name for path in out.iterdir()) == before
    assert run("index", out).returncode == 0
    assert (out / LENGTH_FILE).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_printed_is_one_line(tmp_path):
    out = tmp_path / "stream"
    write_stream((np.arange(9) for _ in range(30)), out)
    assert_one_line(run("inspect", out, stdout="/dev/full"))
    assert_one_line(run("--version", stdout="/dev/full"))


def test_a_report_that_does_not_fit_is_not_left_in_part(tmp_path, monkeypatch):
    write_stream([[1, 2, 3]] * 100, tmp_path / "s")
    streams = [Stream(local=tmp_path / "s")]
    dataset = PackedStreamingDataset(streams, packing=Packing(max_seq_len=64))
    path = tmp_path / "reports" / "report.html"
    path.parent.mkdir()
    write_report(dataset, path)  # loads everything needed for drawing
    path.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(dataset, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert list(path.parent.iterdir()) == []
    write_report(dataset, path)
    assert path.read_text().endswith("</html>\n")
