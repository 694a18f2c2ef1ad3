"""Signals to the whole process group: the handler of docs/operations.md saves one checkpoint.

::

    test --forks--> job --forks--> workers           the job leads a new process group
      '--signal to the group---> job, workers        as scancel, `docker stop` and kill -- -PGID do
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.faults.servers import free_port

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SIGNALLED_AT = 12  # batches, of far more
JOB = """
import time

rank = int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()  # rank 0 has written the streams


def train_step(batch):
    with open(f"consumed-{rank}.jsonl", "a") as log:
        line = {"pid": os.getpid(), "position": batch["position"]}
        log.write(json.dumps(line | {"segments": batch["segments"].tolist()}) + "\\n")
    time.sleep(0.03)


train(PackedDataLoader(make_dataset(), num_workers=2), train_step, Path(f"{rank}.json"))
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
"""


def page_code(folder: Path) -> tuple[str, str]:
    """The page's code that makes the dataset, in a folder, and its handler."""
    text = PAGE.read_text()
    assert "## Preemption" in text
    before, after = text.split("## Preemption")
    first, handler = (
        re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)[0] for part in (before, after)
    )
    is_first = 'if os.environ.get("RANK", "0") == "0" and not os.path.exists("data/code"):'
    writing = 'for name in ("web", "code"):\n    write'
    assert writing in first
    first = first.replace(writing, f"{is_first}\n    " + writing.replace("\n", "\n    "))
    first = first.split("\n\ndataset = make_dataset()")[0]  # the job makes its own
    return f"import os\nos.chdir({str(folder)!r})\n{first}", handler


def write_job(folder: Path) -> Path:
    """Write the page's code up to its handler, followed by a training loop that uses it."""
    script = folder / "job.py"
    script.write_text("".join([*page_code(folder), JOB]))
    return script


def consumed(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = folder / f"consumed-{rank}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@contextmanager
def started(script: Path, **variables: object) -> Iterator[ForkProcess]:
    """Run a job in a fork of this process, so that it need not import torch again."""

    def run() -> None:
        os.setsid()
        warnings.simplefilter("ignore")  # in tests they are errors
        torch.set_num_threads(1)  # OpenMP's threads are not in a fork, which would wait for them
        os.environ.update({name: str(value) for name, value in variables.items()})
        runpy.run_path(str(script))
        os._exit(0)  # gloo's threads can keep a process from exiting

    job = ForkProcess(target=run)
    job.start()
    try:
        yield job
    finally:
        job.kill()
        job.join()


def end_of(job: ForkProcess) -> int | None:
    job.join(120)
    return job.exitcode


def wait_for(folder: Path, number: int, job: ForkProcess, rank: int = 0) -> None:
    deadline_s = time.monotonic() + 120
    while len(consumed(folder, rank)) < number:
        assert job.is_alive()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_job_whose_group_is_signalled_saves_once_and_resumes_exactly(
    tmp_path, monkeypatch, number
):
    script = write_job(tmp_path)
    with started(script) as job:
        wait_for(tmp_path, SIGNALLED_AT, job)
        os.killpg(job.pid, number)
        assert end_of(job) == 0
    first = consumed(tmp_path)
    saved = json.loads((tmp_path / "0.json").read_text())

    assert {line["pid"] for line in first} == {job.pid}
    assert saved["position"] == first[-1]["position"]
    with started(script) as job:
        assert end_of(job) == 0
    resumed = consumed(tmp_path)
    monkeypatch.chdir(tmp_path)  # and back after the test
    names: dict[str, Any] = {}
    exec(page_code(tmp_path)[0], names)
    whole = [batch["segments"].tolist() for batch in names["make_dataset"]()]
    assert [line["segments"] for line in resumed] == whole
    assert len(first) < len(whole)


def test_ranks_stop_after_the_same_step_when_one_of_them_is_signalled(tmp_path):
    script = write_job(tmp_path)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": 0}
    shared |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    with (
        started(script, RANK=0, LOCAL_RANK=0, **shared) as first,
        started(script, RANK=1, LOCAL_RANK=1, **shared) as second,
    ):
        wait_for(tmp_path, SIGNALLED_AT, second, rank=1)
        os.kill(second.pid, signal.SIGUSR1)
        assert [end_of(first), end_of(second)] == [0, 0]
    ranks = [consumed(tmp_path, rank) for rank in range(2)]
    saved = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    assert len(ranks[0]) == len(ranks[1])
    assert saved[0]["position"] == saved[1]["position"] == ranks[0][-1]["position"]
