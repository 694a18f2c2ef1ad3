"""Trainer and Lightning, killed while they save: each step's packs are those of a whole run.

::

    whole      steps 1 ... 10
    killed     steps 1 ... 6, SIGKILL at one of the events of the save of step 6
    resumed    from the last complete checkpoint, which is of step 4 or 6

Cost: 40 s for three kills; the slow ones, at ten moments for each kind of run, take minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trainers_seen import ROOT
from tests.helpers.worlds.torchrun_agents import PATIENCE_S, environment

JOB = ROOT / "tests" / "helpers" / "worlds" / "killed_trainers_job.py"
MAX_STEPS = 10
SAVES = {4, 6}  # what a kill in the save of step 6 may leave

Steps = dict[int, list[list[str]]]


def read_steps(out: Path, run: int, num_ranks: int) -> Steps:
    """The packs of each step, rank by rank."""
    steps: Steps = {}
    for rank in range(num_ranks):
        lines = (out / f"steps-{run}-rank{rank}.jsonl").read_text().splitlines()
        for step, rows in map(json.loads, lines):
            steps.setdefault(step, []).append(rows)
    return steps


def check_kills(tmp_path: Path, kind: tuple[str, str, int], shares: list[float]) -> set[int]:
    """Kill a run at shares of a save's events; return the steps from which it resumed."""
    trainer, dataset, num_ranks = kind
    common = {"trainer": trainer, "dataset": dataset, "ranks": num_ranks, "kill_at": None}
    whole = common | {"out": str(tmp_path / "whole")}
    runs: list[dict[str, Any]] = [whole]
    for number, share in enumerate(shares):
        again = common | {"out": str(tmp_path / str(number))}
        runs += [again | {"share": share, "of": whole["out"], "of_run": 0}, again]
    for run in runs:
        Path(run["out"]).mkdir(exist_ok=True)
    told = tmp_path / "told.json"
    told.write_text(json.dumps({"runs": runs}))
    done = subprocess.run(
        [sys.executable, JOB, told],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]

    expected = read_steps(tmp_path / "whole", 0, num_ranks)
    assert sorted(expected) == list(range(1, MAX_STEPS + 1))
    assert all(len(ranks) == num_ranks and all(ranks) for ranks in expected.values())
    begins = set()
    for number in range(len(shares)):
        out = tmp_path / str(number)
        killed = read_steps(out, 1 + 2 * number, num_ranks)
        resumed = read_steps(out, 2 + 2 * number, num_ranks)
        begin = min(resumed) - 1
        assert begin in SAVES
        assert sorted(resumed) == list(range(begin + 1, MAX_STEPS + 1))
        assert {step: killed[step] for step in range(1, begin + 1)} | resumed == expected
        begins.add(begin)
    return begins


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        (("trainer", "planned", 1), 0.95),  # while the older checkpoint is deleted
        (("trainer", "iterable", 2), 0.5),
        (("lightning", "planned", 2), 0.0),
    ],
    ids=str,
)
def test_a_run_killed_while_it_saves_goes_on_as_if_it_never_was(tmp_path, kind, share):
    begins = check_kills(tmp_path, kind, [share])

    if share == 0.95:
        assert begins == {6}, "the new checkpoint is complete before the older one is deleted"
    if share == 0.0:
        assert begins == {4}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trainer", "lightning"])
@pytest.mark.parametrize("dataset", ["planned", "iterable"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_killed_at_any_of_ten_moments_goes_on(tmp_path, trainer, dataset, num_ranks):
    begins = check_kills(tmp_path, (trainer, dataset, num_ranks), [n / 10 for n in range(10)])

    assert begins <= SAVES
    if trainer == "trainer":
        assert begins == SAVES
