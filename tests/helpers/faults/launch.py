"""Start jobs, kill them at a given batch or request, and check everything they delivered.

A server imports everything once; a job that is forked from it takes 0.1 s instead of 4 s. If it
runs as root, the server has its own mount namespace. Then only its jobs use its /dev/shm, and tests
can mount small disks that no other process sees. Every wait has a bound.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pytest

from tests.helpers.faults import harness, servers
from tests.helpers.faults.faultserver import FaultServer
from tests.helpers.faults.job import read_log

ROOT = Path(__file__).parents[3]
BOUND_S = 60.0
START_S = 300.0  # the server imports everything, and compiles kernels where none are kept
SHARED_MEMORY = "256m"
PRIVATE = f'mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm && exec "$@"'


class Job:
    def __init__(self, folder: Path, events: socket.socket) -> None:
        self.folder = folder
        self._events = events
        self.num_batches = 0
        self.status: int | None = None
        """What it returned, or minus the signal that ended it; None while it runs."""
        self.pid = int(self.hear().removeprefix("pid "))

    def hear(self, timeout_s: float = BOUND_S) -> str:
        """Wait for the next message of the job, and return it."""
        ready, _, _ = select.select([self._events], [], [], timeout_s)
        assert ready, f"{self.folder}: the job said nothing for {timeout_s} s; {self.errors()}"
        try:
            said = self._events.recv(100).decode()
        except ConnectionResetError:  # it ended without reading our last message
            said = ""
        if said.startswith("exit"):
            self.status = int(said.split()[1])
        self.num_batches += said == "batch"
        return said

    def errors(self) -> str:
        path = self.folder / "stderr"
        return path.read_text()[-3000:] if path.is_file() else ""

    def wait_for_batches(self, num_batches: int, timeout_s: float = BOUND_S) -> None:
        while self.num_batches < num_batches:
            said = self.hear(timeout_s)
            assert said == "batch", f"{said} after {self.num_batches} batches; {self.errors()}"

    def go_on(self) -> None:
        """Let a job that runs in step take its next batch."""
        with suppress(BrokenPipeError):
            self._events.send(b"go")

    def join(self, timeout_s: float = BOUND_S) -> int:
        """Wait for the job to end, at most `timeout_s` per batch, and return its status."""
        while self.status is None:
            self.hear(timeout_s)
        return self.status

    def workers(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task")
        found = [int(p) for t in tasks.iterdir() for p in (t / "children").read_text().split()]
        return sorted(found)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal to the job together with its workers, and wait for the job to end."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        return self.join()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._events.close()


class Jobs:
    """The server that forks jobs; a context."""

    def __init__(self) -> None:
        private = ["unshare", "--mount", "sh", "-c", PRIVATE, "sh"]
        with suppress(FileNotFoundError):
            done = subprocess.run([*private, "true"], capture_output=True, timeout=BOUND_S)
            self.is_private = done.returncode == 0
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.helpers.faults.job", str(other.fileno())]
        command = [*private, *command] if self.is_private else command
        self._server = subprocess.Popen(command, cwd=ROOT, pass_fds=[other.fileno()])
        other.close()
        ready, _, _ = select.select([self._control], [], [], START_S)
        assert ready, f"the server is not ready after {START_S} s"
        assert self._control.recv(10) == b"ready", "the server ended while it started"
        self._started: list[Job] = []
        # Keep it short: multiprocessing puts its sockets there, and their paths are limited to 107
        # bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="jobs-"))
        self._num_temporary = 0

        self.unbroken: dict[str, list[tuple[int, int, str]]] = {}
        """The batches of runs without faults, by their configs; see `Bench.unbroken`."""

    is_private = False
    """Whether jobs see mounts of their own."""

    def new_temporary(self) -> Path:
        self._num_temporary += 1
        folder = self._temporary / str(self._num_temporary)
        folder.mkdir()
        return folder

    def start_and_take(self, config: dict[str, Any], num_batches: int) -> Job:
        """Start a job and return once it has some batches; it takes 3 more and then waits.

        This way it is certainly still running when the test kills it or takes something away.
        """
        job = self.start({**config, "pause_at": num_batches + 3})
        job.wait_for_batches(num_batches)
        return job

    def start(self, config: dict[str, Any]) -> Job:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            socket.send_fds(self._control, [json.dumps(config).encode()], [other.fileno()])
        job = Job(Path(config["folder"]), own)
        self._started.append(job)
        return job

    def run(self, config: dict[str, Any], timeout_s: float = BOUND_S) -> Job:
        job = self.start(config)
        job.join(timeout_s)
        return job

    def run_all(self, configs: Sequence[dict[str, Any]]) -> list[Job]:
        started = [self.start(config) for config in configs]
        for job in started:
            job.join()
        return started

    def run_in_step(self, configs: Sequence[dict[str, Any]]) -> list[Job]:
        """Run jobs in lockstep, one batch each per step, like the ranks of a training job."""
        started = [self.start({**config, "in_step": True}) for config in configs]
        while any(job.status is None for job in started):
            running = [job for job in started if job.status is None]
            for job in running:
                before = job.num_batches
                while job.status is None and job.num_batches == before:
                    job.hear()
            for job in running:
                job.go_on()
        return started

    def path(self, path: Path | str) -> Path:
        """Return this process's path to a path inside the jobs' mount namespace."""
        return Path(f"/proc/{self._server.pid}/root{Path(path).absolute()}")

    def _inside(self, *command: str) -> None:
        if not self.is_private:
            pytest.skip("needs a mount namespace of its own: run as root, with unshare")
        entered = ["nsenter", f"--mount=/proc/{self._server.pid}/ns/mnt", *command]
        subprocess.run(entered, check=True, timeout=BOUND_S, capture_output=True)

    def mount(self, folder: Path, size: str) -> Path:
        """Mount a small disk at the jobs' `folder`, and return this process's path to it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._inside("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        return self.path(folder)

    def remount(self, folder: Path | str, options: str) -> None:
        self._inside("mount", "-o", f"remount,{options}", str(folder))

    def shared_memory(self) -> list[str]:
        """Return the names in the jobs' /dev/shm."""
        if not self.is_private:
            pytest.skip("needs a mount namespace of its own: run as root, with unshare")
        return sorted(path.name for path in self.path("/dev/shm").iterdir())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._started:
            job.close()
        self._control.close()
        self._server.kill()  # it has nothing to clean up, and exiting normally takes a while
        self._server.wait(BOUND_S)
        shutil.rmtree(self._temporary, ignore_errors=True)


def temporary_of(config: dict[str, Any]) -> Path:
    return Path(config["environment"]["TMPDIR"])


def batches(folder: Path) -> list[dict[str, Any]]:
    """Return the batches that count; a restart from an earlier position discards those after it."""
    kept: list[dict[str, Any]] = []
    for line in read_log(folder):
        if "began" in line:
            began = tuple(line["began"])
            kept = [batch for batch in kept if (batch["epoch"], batch["position"]) <= began]
        elif "position" in line:
            kept.append(line)
    return kept


def segments(folders: Sequence[Path], epoch: int = 0) -> list[list[int]]:
    """Return the segments that the jobs in these folders received in an epoch."""
    given = [batch for folder in folders for batch in batches(folder) if batch["epoch"] == epoch]
    return [segment for batch in given for segment in batch["segments"]]


def outcome(folder: Path) -> dict[str, Any]:
    """Return how the last start ended; empty if it was killed."""
    log = read_log(folder)
    return log[-1] if log and "outcome" in log[-1] else {}


def wait_for_end(pids: Sequence[int], timeout_s: float) -> None:
    """Wait until processes that are not our children have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ready, _, _ = select.select([descriptor], [], [], timeout_s)
            os.close(descriptor)
            assert ready, f"process {pid} still runs after {timeout_s} s"


@dataclass(kw_only=True)
class Bench:
    """Everything a test of jobs needs: streams behind a faulty store, folders, the server."""

    jobs: Jobs
    server: FaultServer
    folder: Path
    datasets: Sequence[harness.DataSet]
    options: dict[str, Any] = field(default_factory=dict)
    """Defaults for the configs."""

    def cache(self, name: str = "cache") -> Path:
        return self.folder / name

    def streams(
        self, cache: str = "cache", *, s3: bool = True, **options: Any
    ) -> list[dict[str, Any]]:
        common = {"timeout": 10, "retry": 2, **options}
        folder = self.datasets[0].folder.parent
        bucket = f"s3://{folder.name}" if s3 else str(folder)
        return [
            {
                "remote": f"{bucket}/{dataset.folder.name}",
                "local": str(self.cache(cache) / dataset.folder.name),
                **common,
            }
            for dataset in self.datasets
        ]

    def config(self, name: str = "job", **options: Any) -> dict[str, Any]:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        common: dict[str, Any] = {
            "streams": self.streams(),
            "packing": {"max_seq_len": 512},
            "mixing": {"global_batch_size": 8},
            "order": {},
            "buffers": {},
            "loader": {},
            "world": {},
            "batch_size": 2,
            "num_epochs": 1,
            "state": None,
            "environment": {},
            "in_step": False,
            "pause_at": None,
            "torch_loader": False,
        } | self.options
        unknown = set(options) - set(common)
        assert not unknown, f"no option of a job: {unknown}"
        whole = common | options | {"folder": str(folder)}
        whole["order"] = {"seed": 3, "shuffle_block_size": 100, "num_lanes": 1} | whole["order"]
        whole["environment"] = {
            "TMPDIR": str(self.jobs.new_temporary()),
            **servers.s3_variables(self.server.url),
            **whole["environment"],
        }
        return whole

    def check_exact(self, *configs: dict[str, Any], num_epochs: int = 1) -> None:
        """Check that the jobs together received each token once per epoch, and unaltered."""
        folders = [Path(config["folder"]) for config in configs]
        altered = sum(batch["altered"] for folder in folders for batch in batches(folder))
        assert altered == 0, f"{altered} tokens altered"
        for epoch in range(num_epochs):
            audit = harness.Audit(self.datasets)
            audit.add_order(segments(folders, epoch))
            assert audit.is_exact, f"epoch {epoch}: {audit}"

    def check_as_unbroken(self, config: dict[str, Any]) -> None:
        """Check that a job received, over all its starts, the same as a job that never stopped."""
        given = [(b["epoch"], b["position"], b["digest"]) for b in batches(Path(config["folder"]))]
        pairs = enumerate(zip(given, self.unbroken, strict=False))
        differing = [(place, *pair) for place, pair in pairs if pair[0] != pair[1]]
        assert not differing, f"{len(differing)} batches differ, the first is {differing[0]}"
        assert len(given) == len(self.unbroken)

    @cached_property
    def unbroken(self) -> list[tuple[int, int, str]]:
        """The batches of a run without faults, straight from the streams' own folders."""
        config = self.config(
            "unbroken", streams=[{"local": str(dataset.folder)} for dataset in self.datasets]
        )
        asked = json.dumps({k: v for k, v in config.items() if k not in ("folder", "environment")})
        known = self.jobs.unbroken
        if asked not in known:
            assert self.jobs.run(config).status == 0
            given = batches(Path(config["folder"]))
            known[asked] = [(b["epoch"], b["position"], b["digest"]) for b in given]
        return known[asked]

    def check_clean(self, *configs: dict[str, Any], cache: str = "cache") -> None:
        """Check that no leftovers are in the cache, /dev/shm or the system's temporary folder."""
        folder = self.jobs.path(self.cache(cache))
        assert harness.temporary_names(folder) == []
        for config in configs:
            assert [path.name for path in temporary_of(config).iterdir()] == []
        if self.jobs.is_private:
            assert self.jobs.shared_memory() == []

    def fetches(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for request in self.server.requests("shard", "GET"):
            counts[request.path] = counts.get(request.path, 0) + 1
        return counts
