"""Installation: dependencies resolve, and extras install what they promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = [
    line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_LINES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
# Importing any of these raises, as if it were not installed.
BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
CLOUDS = {
    *("adlfs", "aiohttp", "azure", "boto3", "botocore", "fsspec", "gcsfs", "google"),
    *("google.auth", "google.cloud", "huggingface_hub", "oci", "paramiko", "s3fs"),
}
OTHERS = {"brotli", "datasets", "matplotlib", "pyarrow", "snappy", "streaming", "transformers"}


def run(code: str, cwd: Path, *, blocked: set[str]) -> subprocess.CompletedProcess[str]:
    """Run code in a process where some modules cannot be imported."""
    whole = BLOCKED.format(names=frozenset(blocked)) + code
    return subprocess.run(
        [sys.executable, "-c", whole], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.processes
def test_the_first_lines_of_the_readme_need_nothing_but_the_dependencies(tmp_path):
    done = run(FIRST_LINES, tmp_path, blocked=CLOUDS | OTHERS | {"torchvision"})

    assert not done.returncode, done.stderr
    assert done.stdout.startswith("torch.Size([4, 2048]) fill ")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("blocked", "extra", "code"),
    [
        (
            "matplotlib",
            "plots",
            "sys.argv = ['streampack', 'demo']; from streampack.cli import main; main()",
        ),
        (
            "brotli",
            "codecs",
            "from streampack.write import write_stream; "
            "write_stream([[1, 2, 3]], 'out', compression='br')",
        ),
    ],
)
def test_without_what_an_extra_installs_the_error_names_the_extra(tmp_path, blocked, extra, code):
    done = run(code, tmp_path, blocked={blocked})

    assert done.returncode
    said = " ".join(done.stderr.split())
    assert f"needs {blocked}" in said
    assert f"pip install 'streampack[{extra}]'" in said
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out"])


def resolved(python: str, wanted: list[str], folder: Path, *options: str) -> dict[str, str]:
    """Return the versions that pip would install on a version of Python, using only wheels."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--target", str(folder / "target"), "--only-binary=:all:"]
    command += ["--python-version", python, "--report", str(report), *options, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if re.search("Max retries|NewConnectionError|Temporary failure in name", done.stderr):
        pytest.skip("no package index can be reached")
    assert not done.returncode, done.stderr
    rows = json.loads(report.read_text())["install"]
    return {row["metadata"]["name"].lower(): row["metadata"]["version"] for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_dependencies_resolve_from_wheels_beside_todays_transformers(python, tmp_path):
    # Without torch and its dependents, since on some indexes its wheel has hundreds of megabytes.
    core = [line for line in PROJECT["dependencies"] if not line.startswith("torch")]
    extras = [
        line for name in ("azure", "codecs", "gcs", "plots", "tables") for line in EXTRAS[name]
    ]
    hf = [line for line in EXTRAS["hf"] if not line.startswith("accelerate")]

    found = resolved(python, [*core, *extras, *hf, "transformers>=5"], tmp_path)

    assert found["transformers"].startswith("5.")
    assert not {"mosaicml-streaming", "torch", "torchvision"} & found.keys()


def test_the_workflow_runs_the_pythons_of_the_classifiers():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)

    assert re.findall(r'"(.*?)"', matrix) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
