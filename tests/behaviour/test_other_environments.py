"""TRL and PEFT, each in an environment of its own that sees the packages of this one.

Cost: some minutes, and downloads; so all of it is slow.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trainers_seen import ROOT
from tests.helpers.worlds.torchrun_agents import PATIENCE_S, environment


def run_with(package: str, job: str, folder: Path) -> Any:
    """Install a package next to those of this environment, run a job, return what it saw."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
    script = ROOT / "tests" / "helpers" / "worlds" / job
    subprocess.run(
        [python, "-W", "ignore", script, folder],
        env=environment(),
        timeout=PATIENCE_S,
        check=True,
    )
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.slow
def test_trl_learns_the_same_targets_in_as_many_steps(tmp_path):
    seen = run_with("trl==1.16.0", "trl_job.py", tmp_path)

    assert len(seen["ours"]["samples"]) == 2000
    assert seen["ours"]["samples"] == seen["trl"]["samples"]
    assert abs(seen["ours"]["steps"] - seen["trl"]["steps"]) <= 1


@pytest.mark.slow
def test_lora_is_trained_checkpointed_and_resumed(tmp_path):
    seen = run_with("peft==0.21.2", "lora_job.py", tmp_path)

    assert len(seen["whole"]["losses"]) == 4
    assert len(set(seen["whole"]["losses"])) == 4
    assert seen["resumed"] == seen["whole"]
    assert seen["checkpointed"]["losses"] == pytest.approx(seen["whole"]["losses"], abs=1e-5)


def statements(page: str, fence: str, needle: str) -> int:
    """The statements of the block of a page that has these words."""
    blocks = re.findall(rf"```{fence}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    (block,) = [block for block in blocks if needle in block]
    return len(ast.parse(block).body)


def test_the_script_is_about_as_short_as_that_of_trl():
    assert statements("quickstart-finetuning.md", "python", "import PackedTrainer") <= 12
    theirs = statements("migrating-trl-axolotl.md", "py", "import SFTConfig")
    ours = statements("migrating-trl-axolotl.md", "py", "import PackedTrainer")
    assert (theirs, ours) == (8, 9), "as the page has it"
