"""Signals to the whole process group: the handler of docs/operations.md saves one checkpoint.

::

    test --starts--> job --forks--> workers          the job leads a new process group
      '--signal to the group---> job, workers        as scancel, `docker stop` and kill -- -PGID do
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.worlds.torchrun_agents import torchrun

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


def wait_for(folder: Path, number: int, job: subprocess.Popen[bytes], rank: int = 0) -> None:
    deadline_s = time.monotonic() + 120
    while len(consumed(folder, rank)) < number:
        assert job.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_job_whose_group_is_signalled_saves_once_and_resumes_exactly(
    tmp_path, monkeypatch, number
):
    script = write_job(tmp_path)
    command = [sys.executable, str(script)]
    job = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for(tmp_path, SIGNALLED_AT, job)
        os.killpg(job.pid, number)
        assert job.wait(120) == 0
    finally:
        job.kill()
    first = consumed(tmp_path)
    saved = json.loads((tmp_path / "0.json").read_text())

    assert {line["pid"] for line in first} == {job.pid}
    assert saved["position"] == first[-1]["position"]
    assert subprocess.run(command, check=False, timeout=120).returncode == 0
    resumed = consumed(tmp_path)
    monkeypatch.chdir(tmp_path)  # and back after the test
    names: dict[str, Any] = {}
    exec(page_code(tmp_path)[0], names)
    whole = [batch["segments"].tolist() for batch in names["make_dataset"]()]
    assert [line["segments"] for line in resumed] == whole
    assert len(first) < len(whole)


def test_ranks_stop_after_the_same_step_when_one_of_them_is_signalled(tmp_path):
    script = write_job(tmp_path)
    with torchrun(script, [], log=tmp_path / "log", num_ranks=2) as job:
        [agent] = job.agents
        wait_for(tmp_path, SIGNALLED_AT, agent, rank=1)
        os.kill(consumed(tmp_path, 1)[-1]["pid"], signal.SIGUSR1)
        assert agent.wait(120) == 0, (tmp_path / "log").read_text()
    ranks = [consumed(tmp_path, rank) for rank in range(2)]
    saved = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    assert len(ranks[0]) == len(ranks[1])
    assert saved[0]["position"] == saved[1]["position"] == ranks[0][-1]["position"]
