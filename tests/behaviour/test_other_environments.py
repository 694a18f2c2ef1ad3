"""TRL, PEFT and transformers 4.57, in separate environments on top of this one's packages."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trainers_seen import ROOT
from tests.helpers.worlds.torchrun_agents import PATIENCE_S, environment, run_job


def make_environment(folder: Path, *packages: str) -> Path:
    """Install packages on top of those of this environment; return the path of that Python."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def seen_by(job: str, folder: Path, *packages: str) -> Any:
    """Run a job with these packages installed, and return its observations."""
    run_job(job, folder, python=make_environment(folder, *packages))
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.slow
def test_trl_learns_the_same_targets_in_as_many_steps(tmp_path):
    seen = seen_by("trl_job.py", tmp_path, "trl==1.16.0")

    assert len(seen["ours"]["samples"]) == 2000
    assert seen["ours"]["samples"] == seen["trl"]["samples"]
    assert abs(seen["ours"]["steps"] - seen["trl"]["steps"]) <= 1


@pytest.mark.slow
def test_lora_and_qlora_are_trained_checkpointed_and_resumed(tmp_path):
    seen = seen_by("lora_job.py", tmp_path, "peft==0.21.2", "bitsandbytes==0.50.2")

    for runs in seen.values():
        assert len(set(runs["whole"]["losses"])) == 4
        assert runs["resumed"] == runs["whole"]
    losses = seen["lora"]["whole"]["losses"]
    assert seen["checkpointed"]["whole"]["losses"] == pytest.approx(losses, abs=1e-5)
    assert seen["qlora"]["whole"]["losses"] == pytest.approx(losses, rel=0.1)


@pytest.mark.slow
def test_trainers_are_the_same_with_transformers_4_57(tmp_path):
    python = make_environment(tmp_path, "transformers==4.57.6", "datasets<5")  # they share a hub
    version = [python, "-c", "import transformers; print(transformers.__version__)"]
    done = subprocess.run(version, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "4.57.6\n"
    tests = ("tests/hf", "tests/behaviour/test_killed_trainers.py", "-p", "no:cacheprovider")
    subprocess.run(
        [python, "-m", "pytest", "-q", *tests],
        cwd=ROOT,
        env=environment(),
        timeout=2 * PATIENCE_S,
        check=True,
    )


@pytest.mark.slow
def test_the_loaders_of_the_pages_feed_pipelines_of_megatron_and_torchtitan(tmp_path):
    packages = ["--no-deps", "-r", str(ROOT / "requirements-trainers.txt")]
    for trainer, ranks in seen_by("parallel_trainers_job.py", tmp_path, *packages).items():
        loading = [rank for rank, seen in enumerate(ranks) if "rows" in seen]
        assert loading == ([0, 2, 4, 6] if trainer == "megatron" else list(range(8)))
        assert [seen["dp"] for seen in ranks] == [0, 0, 1, 1] * 2
        rows = {rank: ranks[rank]["rows"] for rank in loading}
        assert all(rows[rank] == rows[ranks[rank]["dp"] * 2] for rank in loading)
        assert rows[0] != rows[2]
        for seen in ranks:
            assert "ranks 0 and 4 work on one model, but get different" in seen["refused"]
            assert seen.get("resumed") == seen.get("next")
