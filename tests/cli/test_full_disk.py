"""Verbs on a full disk: one line, exit code 1, and no incomplete file with a final name."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streampack.mds.length_file import LENGTH_FILE
from streampack.report.drawing import new_figure, save_picture
from streampack.write import write_stream

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
            # Python itself would keep truncated bytecode.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
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


def test_a_picture_that_does_not_fit_is_not_left_in_part(tmp_path, monkeypatch):
    figure, _ = new_figure(400, 200)
    path = tmp_path / "run.png"
    save_picture(figure, path)  # loads everything needed for drawing
    path.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_picture(figure, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert list(tmp_path.iterdir()) == []
    save_picture(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
