"""What a release holds: a wheel and an sdist that are well formed and run once installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FIRST_LINES = PYTHON_BLOCK.findall(README)[0]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build both archives as `make wheel` does, with what is installed."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_the_archives_pass_twine_check(dist):
    archives = sorted(dist.iterdir())
    assert [path.suffix for path in archives] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *archives]
    subprocess.run(command, check=True, capture_output=True)


def test_the_installed_wheel_runs_the_readmes_first_lines(dist, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"])
    target = ["--target", site.decode().strip()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *target]
    subprocess.run([*pip, wheel], check=True, capture_output=True)

    code = f"{FIRST_LINES}\nimport streampack; print(streampack.__file__)"
    # The dependencies are those of this environment; the package is the wheel's.
    env = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    shape, path = done.stdout.splitlines()
    assert shape.startswith("torch.Size([4, 2048]) fill ")
    assert Path(path).is_relative_to(tmp_path / "venv")


def test_the_wheel_has_the_demos_config(dist):
    (wheel,) = dist.glob("*.whl")
    assert "streampack/cli/demo/demo.yaml" in zipfile.ZipFile(wheel).namelist()


def test_pip_finds_a_solution_for_the_wheel_beside_transformers_5(dist):
    (wheel,) = dist.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "transformers>=5", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert not done.returncode, done.stderr
    assert "mosaicml" not in done.stdout
