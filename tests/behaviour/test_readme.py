"""The code in README and docs runs, and the tests, links and arguments they mention exist."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import streaming

from streampack import ConfigError, PackedStreamingDataset
from streampack.write import write_stream

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MIGRATING = (ROOT / "docs" / "migrating-mosaicml.md").read_text(encoding="utf-8")
ARGUMENTS = MIGRATING.split("| StreamingDataset | here |")[1].split("\n## ")[0]


RUN = """
import sys
for code in sys.argv[1:]:
    exec(code, {"__name__": "__main__"})
"""


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run(folder: Path, *scripts: str) -> str:
    """Run scripts one after another in a new process, which imports their libraries once."""
    command = [sys.executable, "-c", RUN, *scripts]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_the_code_of_the_readme_runs_in_one_folder_also_a_second_time(tmp_path):
    pretraining, finetuning = python_blocks(README)

    printed = run(tmp_path, pretraining) + run(tmp_path, pretraining, finetuning)

    first, second, *rest = printed.splitlines()
    assert re.fullmatch(r"torch\.Size\(\[4, 2048\]\) fill (9\d\.\d\d|100\.00)%", first)
    assert second == first
    assert "'train_loss'" in "\n".join(rest)


def shape(line: str) -> str:
    """Return a line of the demo's output without its numbers, hashes, bars and widths."""
    line = re.sub(r"\b[0-9a-f]{16}\b", "hash", line)
    line = re.sub(r"[█▌]+(?=  \d)", "bar", line)
    line = re.sub(r"\d[\d.,]*", "0", line).replace("segments", "segment")
    return re.sub(r"[─ ]+", " ", line).strip()


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows(tmp_path):
    shown = README.split("$ make demo\n")[1].split("$ make test")[0]
    shutil.copytree(ROOT / "configs", tmp_path / "configs")

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo" / "kill_and_resume.py"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )

    printed = iter([shape(line) for line in done.stdout.splitlines()])
    missing = [line for line in shown.splitlines() if line and shape(line) not in printed]
    assert missing == []  # also in this order, since `in` consumes the iterator


def test_the_readme_has_at_most_130_lines():
    assert len(README.splitlines()) <= 130


def test_the_migrations_code_runs_on_both_sides(tmp_path):
    before, after, on_the_fly = python_blocks(MIGRATING)
    for seed, name in enumerate(("web", "code")):
        rng = np.random.default_rng(seed)
        write_stream((rng.integers(0, 99, 200) for _ in range(2000)), tmp_path / "data" / name)

    first = "assert len(next(iter(dataset))['tokens']) == 200"
    packed = "assert next(iter(packed))['tokens'].shape == (1, 2048)"
    both = "\n".join([before, first, before, on_the_fly, packed])
    first_batch = "batch = next(iter(loader)); print(tuple(batch['tokens'].shape))"
    printed = run(tmp_path, both, f"{after}\n{first_batch}")  # from the caches of the former

    assert printed == "(8, 2048)\n"


@pytest.mark.parametrize("argument", list(inspect.signature(streaming.StreamingDataset).parameters))
def test_every_argument_of_streaming_dataset_has_its_row(argument):
    assert f"`{argument}`" in ARGUMENTS


def test_an_argument_of_streaming_dataset_that_is_none_here_is_refused_with_its_place():
    refused = 0
    for names, here in re.findall(r"^\| (`.*?) \| (.*) \|$", ARGUMENTS, flags=re.MULTILINE):
        places = re.findall(r"\b(?:Order|Mixing|Buffers|World|Download)\(", here)
        for name in re.findall(r"`([a-z_]+)`", names) if places else ():
            with pytest.raises(ConfigError) as refusal:
                PackedStreamingDataset(**{name: 1})
            assert re.search(rf"^{name}=1: not an argument of .*; write ", str(refusal.value))
            assert places[0] in str(refusal.value)
            refused += 1
    assert refused > 10
