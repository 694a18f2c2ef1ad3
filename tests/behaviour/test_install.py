"""Installation: dependencies resolve, extras install what they promise, and the wheel runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

import streampack
from tests.helpers.faults.servers import s3_server, s3_variables

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = [
    line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FINE_TUNING = (ROOT / "docs" / "quickstart-finetuning.md").read_text(encoding="utf-8")
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
IMPORTS = re.compile(r"^(?:from \S+ )?import .*$", re.MULTILINE)
FIRST_LINES = PYTHON_BLOCK.findall(README)[0]
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


# The release.


def test_the_changelogs_newest_section_is_that_of_the_version_and_short():
    section = re.split("^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)[1:]
    if section[0].startswith("Unreleased"):
        del section[0]

    assert re.match(rf"{re.escape(streampack.__version__)} - \d{{4}}-\d\d-\d\d\n", section[0])
    assert section[0].count("\n") <= 60


def test_no_page_leads_to_a_place_where_the_project_is_not():
    assert "urls" not in PROJECT
    pages = [ROOT / "zensical.toml", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    nowhere = re.compile(r"github\.(?:com|io)/streampack|pip install '?streampack(?![-\w.]*\[|-\d)")
    assert [path.name for path in pages if nowhere.search(path.read_text(encoding="utf-8"))] == []


# The wheel.

# Written and read by the installed wheel: the shards of the first lines, from a bucket.
FROM_S3 = """
import sys
from streampack import PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.write import write_stream

write_stream(([n % 90] * (n % 50 + 1) for n in range(500)), f"{sys.argv[1]}/bucket/text")
stream = Stream(remote="s3://bucket/text", local="cache")
dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=128), batch_size=2)
loader = PackedDataLoader(dataset, num_workers=1)
print(sum(int((batch["document_ids"] > 0).sum()) for batch in loader))
"""


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


def test_the_source_archive_has_the_package_and_nothing_else(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}

    suffixes = (".py", ".pyi", "py.typed", "page.html", "demo.yaml")
    package = (path for path in (ROOT / "streampack").rglob("*") if path.name.endswith(suffixes))
    wanted = {str(path.relative_to(ROOT)) for path in package}
    wanted |= {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
    wanted |= {"pyproject.toml", "setup.cfg"}
    found = {name for name in names if "." in name or name.isupper()}
    assert {name for name in found if "egg-info" not in name} == wanted


def test_the_installed_wheel_runs_the_readmes_first_lines_with_nothing_but_the_dependencies(
    dist, tmp_path
):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"])
    target = ["--target", site.decode().strip()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *target]
    subprocess.run([*pip, wheel], check=True, capture_output=True)

    code = BLOCKED.format(names=frozenset(CLOUDS | OTHERS | {"torchvision"}))
    code += f"{FIRST_LINES}\nimport streampack; print(streampack.__file__)"
    code += "\nfrom streampack.cli import main; import sys; sys.argv = ['', '--version']; main()"
    # The dependencies are those of this environment; the package is the wheel's.
    env = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=env, check=False, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    shape, path, version = done.stdout.splitlines()
    assert shape.startswith("torch.Size([4, 2048]) fill ")
    assert Path(path).is_relative_to(tmp_path / "venv")
    assert version == streampack.__version__


@pytest.mark.processes
def test_the_imports_of_the_quick_start_for_fine_tuning_work_as_make_install_leaves_them(tmp_path):
    # Without what lets the tests import torchvision, which a clone does not have: a torchvision
    # that does not fit keeps transformers from importing its models. The page itself is run by
    # test_docs.py.
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    code = "\n".join(IMPORTS.findall("".join(PYTHON_BLOCK.findall(FINE_TUNING))))
    assert "PackedTrainer" in code
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert not done.returncode, f"{done.stderr}\ndid you run make install?"


def test_pip_finds_a_solution_for_the_wheel_beside_transformers_5(dist):
    (wheel,) = dist.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "transformers>=5", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert not done.returncode, done.stderr
    assert "mosaicml" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "transformers", ["transformers>=5", "transformers>=4.57,<5"], ids=["today", "4.57"]
)
def test_in_a_venv_of_its_own_the_wheel_trains_with_transformers(dist, tmp_path, transformers):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    pip = [python, "-m", "pip", "install", "--quiet", "torch==2.13.0", transformers]
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*pip, f"{wheel}[hf]"], env=alone, capture_output=True, text=True, check=False
    )
    if re.search("Max retries|NewConnectionError|Temporary failure in name", done.stderr):
        pytest.skip("no package index can be reached")
    assert not done.returncode, done.stderr

    served = tmp_path / "served"
    (served / "bucket").mkdir(parents=True)

    def run(code: str, **env: str) -> str:
        command = [python, "-W", "error::DeprecationWarning:streampack", "-c", code, served]
        done = subprocess.run(
            command, cwd=tmp_path, env=alone | env, capture_output=True, text=True, check=False
        )
        assert not done.returncode, done.stderr
        return done.stdout

    there = run("import importlib.metadata as m; print(*(d.name for d in m.distributions()))")
    assert not {"mosaicml-streaming", "matplotlib", "torchvision"} & set(there.lower().split())
    assert run(FIRST_LINES).startswith("torch.Size([4, 2048]) fill ")
    assert "eval_loss" in run("".join(PYTHON_BLOCK.findall(FINE_TUNING)))
    with s3_server(served) as server:
        # The tokens of 500 samples: 10 times 1 + ... + 50.
        assert run(FROM_S3, **s3_variables(server.url)) == "12750\n"
