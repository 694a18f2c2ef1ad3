"""kill -9 at random moments of `streampack write`: the stream is that of an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.preparing import files_of, jsonl_file, text_rows, tokenizer_file, write_command

NUM_ROWS = 6000
MAIN, GROUP, WORKER = "main", "group", "worker"  # the victims of a kill


OPTIONS = ("--columns", "url", "--part-bytes", "30kb")


@pytest.fixture
def reference(tmp_path):
    """The files of an uninterrupted run in one process, and its seconds."""
    jsonl_file(tmp_path / "rows.jsonl", text_rows(NUM_ROWS))
    tokenizer_file(tmp_path)
    begin = time.monotonic()
    command = write_command(tmp_path, "whole", "--num-workers", "1", *OPTIONS)
    subprocess.run(command, check=True)
    return files_of(tmp_path / "whole"), time.monotonic() - begin


def run_and_kill(arguments: list[str], delay_s: float, victim: str) -> bool:
    process = subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.PIPE)
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        kill(process.pid, victim)
    _, error = process.communicate(timeout=60)
    if process.returncode == 0:
        return False
    # Killing a worker ends the command, with a message on how to continue.
    by_worker = victim == WORKER and b"run it again" in error
    assert by_worker or process.returncode == -signal.SIGKILL, error
    return True


def kill(pid: int, victim: str) -> None:
    """Kill a command, one of its children, or all of its processes."""
    if victim == GROUP:
        os.killpg(pid, signal.SIGKILL)
        return
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if victim == WORKER and children:
        os.kill(int(random.choice(children)), signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)


def check_kills(tmp_path: Path, reference, num_kills: int, seed: int, *options: str) -> None:
    """Kill runs until there were enough kills, and compare each finished stream."""
    whole, seconds = reference
    chance = random.Random(seed)
    kills = num_streams = 0
    while kills < num_kills:
        command = write_command(tmp_path, f"s{num_streams}", *OPTIONS, *options)
        out = tmp_path / f"s{num_streams}"
        num_streams += 1
        is_killed = True
        while is_killed:
            delay = chance.uniform(0.3, 1.0) * seconds if kills < num_kills else 60
            victim = chance.choice((MAIN, GROUP, WORKER))
            is_killed = run_and_kill(command, delay, victim)
            kills += is_killed
        assert files_of(out) == whole
    assert kills >= num_kills


def test_a_write_that_is_killed_at_random_moments_is_finished_byte_for_byte(tmp_path, reference):
    check_kills(tmp_path, reference, 3, 1, "--num-workers", "2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_write_that_is_killed_many_times_is_finished_byte_for_byte(tmp_path, reference, seed):
    check_kills(tmp_path, reference, 50, seed, "--num-workers", str(1 + seed))
