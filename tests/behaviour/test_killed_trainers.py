"""Trainer and Lightning are killed while they save: each step has the packs of an unbroken run.

::

    whole      steps 1 ... 10
    killed     steps 1 ... 6, SIGKILL at one of the events of the save of step 6
    resumed    from the last complete checkpoint, which is of step 4 or 6
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.worlds.torchrun_agents import run_job

MAX_STEPS = 10
SAVES = {4, 6}  # checkpoints that can be the last one after a kill in the save of step 6

Steps = dict[int, list[list[str]]]
Kind = tuple[str, str, int]  # trainer, dataset, number of ranks


def read_steps(out: Path, run: str, num_ranks: int) -> Steps:
    steps: Steps = {}
    for rank in range(num_ranks):
        lines = (out / f"steps-{run}-rank{rank}.jsonl").read_text().splitlines()
        for step, rows in map(json.loads, lines):
            steps.setdefault(step, []).append(rows)
    return steps


def run_kills(folder: Path, kills: dict[Kind, list[float]]) -> None:
    """Run each kind unbroken, and killed at shares of a save's events, in forks of one process."""
    runs: list[dict[str, Any]] = []
    for kind, shares in kills.items():
        trainer, dataset, num_ranks = kind
        common = {"trainer": trainer, "dataset": dataset, "ranks": num_ranks, "kill_at": None}
        whole = common | {"out": str(out_of(folder, kind)), "name": "whole"}
        events = {"of": whole["out"], "of_run": "whole"}
        runs.append(whole)
        for share in shares:
            again = common | {"out": str(out_of(folder, kind, share))}
            runs += [
                again | events | {"share": share, "name": "killed"},
                again | {"name": "resumed"},
            ]
    for run in runs:
        Path(run["out"]).mkdir(parents=True, exist_ok=True)
    told = folder / "told.json"
    told.write_text(json.dumps({"runs": runs}))
    run_job("killed_trainers_job.py", told)


def out_of(folder: Path, kind: Kind, share: float | None = None) -> Path:
    return folder / "-".join(map(str, kind)) / ("whole" if share is None else str(share))


def check_kills(folder: Path, kind: Kind, shares: list[float]) -> set[int]:
    """Compare what was killed and resumed with a whole run; return where it resumed."""
    num_ranks = kind[-1]
    expected = read_steps(out_of(folder, kind), "whole", num_ranks)
    assert sorted(expected) == list(range(1, MAX_STEPS + 1))
    assert all(len(ranks) == num_ranks and all(ranks) for ranks in expected.values())
    begins = set()
    for share in shares:
        out = out_of(folder, kind, share)
        killed = read_steps(out, "killed", num_ranks)
        resumed = read_steps(out, "resumed", num_ranks)
        begin = min(resumed) - 1
        assert begin in SAVES
        assert sorted(resumed) == list(range(begin + 1, MAX_STEPS + 1))
        assert {step: killed[step] for step in range(1, begin + 1)} | resumed == expected
        begins.add(begin)
    return begins


QUICK: dict[Kind, float] = {
    ("trainer", "planned", 1): 0.95,  # while the older checkpoint is deleted
    ("trainer", "iterable", 2): 0.5,
    ("lightning", "planned", 2): 0.0,
}


@pytest.fixture(scope="module")
def quick_kills(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    run_kills(folder, {kind: [share] for kind, share in QUICK.items()})
    return folder


@pytest.mark.parametrize(("kind", "share"), QUICK.items(), ids=str)
def test_a_run_killed_while_it_saves_goes_on_as_if_it_never_was(quick_kills, kind, share):
    begins = check_kills(quick_kills, kind, [share])

    if share == 0.95:
        assert begins == {6}, "the new checkpoint is complete before the older one is deleted"
    if share == 0.0:
        assert begins == {4}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trainer", "lightning"])
@pytest.mark.parametrize("dataset", ["planned", "iterable"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_killed_at_any_of_ten_moments_goes_on(tmp_path, trainer, dataset, num_ranks):
    kind, shares = (trainer, dataset, num_ranks), [n / 10 for n in range(10)]
    run_kills(tmp_path, {kind: shares})
    begins = check_kills(tmp_path, kind, shares)

    assert begins <= SAVES
    if trainer == "trainer":
        assert begins == SAVES
