"""Parts written by a real Ray on this machine have the same bytes, with and without kills."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.faults.servers import free_port
from tests.helpers.preparing import files_of, jsonl_file, text_rows, tokenizer_file, write_command
from tests.helpers.worlds.consumed import wait_until

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'streampack[ray]'"
    ),
    # Ray does not close all of its files and sockets.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LIMIT_S = 120


@pytest.fixture
def whole(tmp_path):
    jsonl_file(tmp_path / "rows.jsonl", text_rows(3000))
    tokenizer_file(tmp_path)
    subprocess.run(command(tmp_path, "whole", "processes"), check=True, timeout=LIMIT_S)
    return files_of(tmp_path / "whole")


def command(tmp_path: Path, out: str, engine: str) -> list[str]:
    options = ("--part-bytes", "20kb", "--engine", engine, "--num-workers", "2")
    return write_command(tmp_path, out, *options)


def kill_and_finish(tmp_path: Path, out: str, chance: random.Random) -> None:
    """Kill a run on Ray, or one of Ray's own processes, once a part is done; rerun it."""
    process = subprocess.Popen(command(tmp_path, out, "ray"), start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if any((tmp_path / out).glob("parts/*/part.json")):
            time.sleep(chance.uniform(0, 0.3))
            break
        time.sleep(0.02)
    if chance.random() < 0.5:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    subprocess.run(command(tmp_path, out, "ray"), check=True, timeout=LIMIT_S)


def test_a_run_on_ray_that_is_killed_is_finished_byte_for_byte(tmp_path, whole):
    kill_and_finish(tmp_path, "s", random.Random(1))
    assert files_of(tmp_path / "s") == whole


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_runs_on_ray_that_are_killed_are_finished_byte_for_byte(tmp_path, whole, seed):
    kill_and_finish(tmp_path, "s", random.Random(seed))
    assert files_of(tmp_path / "s") == whole


def is_listening(port: int) -> bool:
    with socket.socket() as tried:
        return not tried.connect_ex(("127.0.0.1", port))


def ray_command(*arguments: str) -> list[str]:
    code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_is_reached_as_the_error_says(tmp_path, whole):
    """Clusters of Ray 2.60 require one by default, but connecting programs do not send it."""
    port = free_port()
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    surroundings |= {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    with_token = surroundings | {"RAY_AUTH_MODE": "token"}
    # Not the folder where other runs look for a cluster; the paths of sockets must be short.
    own = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    head = ("start", "--head", "--num-cpus=1", f"--port={port}", "--include-dashboard=false")
    head += ("--temp-dir", own)
    subprocess.run(
        ray_command("get-auth-token", "--generate"), env=with_token, check=True, timeout=LIMIT_S
    )
    node = subprocess.Popen(ray_command(*head, "--block"), env=with_token, start_new_session=True)
    try:
        wait_until(lambda: is_listening(port), lambda: node.poll() is not None, timeout_s=LIMIT_S)
        surroundings["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        write = command(tmp_path, "s", "ray")
        refused = subprocess.run(
            write, env=surroundings, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert refused.returncode == 2
        named = re.search(rf"RAY_ADDRESS='127.0.0.1:{port}'.* set (\w+)=(\w+) if", refused.stderr)
        assert named is not None
        name, value = named.groups()
        subprocess.run(write, env=surroundings | {name: value}, check=True, timeout=LIMIT_S)
        assert files_of(tmp_path / "s") == whole
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait(LIMIT_S)
        shutil.rmtree(own, ignore_errors=True)
