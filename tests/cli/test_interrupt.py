"""Ctrl-C in a terminal: one line, exit code 130, and no incomplete file with a final name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from tokenizers import Tokenizer, models

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
    """A file of rows that would take a minute to encode, and a tokenizer."""
    rows = tmp_path / "rows.jsonl"
    line = '{"text": "' + "a b c d e f g h " * 200 + '"}\n'
    rows.write_text(line * 60_000)
    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, " ": 1, "b": 2}, [], unk_token="a")).save(str(tokenizer))
    return rows, tokenizer


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_no_worker_of_a_write_is_interrupted_itself():
    code = """
from streampack.write.engines import _start_worker
for _ in range(2):
    pipe, process = _start_worker(1)
    print(open(f"/proc/{process.pid}/status").read())
    process.kill()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    blocked = [int(mask, 16) for mask in re.findall(r"SigBlk:\s*(\w+)", done.stdout)]
    assert [mask >> (signal.SIGINT - 1) & 1 for mask in blocked] == [1, 1]


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
