"""The README says what is true: its code runs, and the tests that it names are there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streampack import ConfigError, PackedStreamingDataset
from streampack.streams import mosaic

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# The class that Stream belongs to; its package can be imported once `mosaic` was.
STREAMING_DATASET = sys.modules[mosaic.Stream.__module__.split(".")[0]].StreamingDataset


def test_the_lines_that_run_do_run(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) == 12

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"torch\.Size\(\[4, 2048\]\) fill (9\d\.\d\d|100\.00)%\n", done.stdout)


def test_every_test_that_is_named_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", README)

    assert len(named) > 10
    assert [name for name in named if f"def {name}(" not in tests] == []


@pytest.mark.parametrize("argument", list(inspect.signature(STREAMING_DATASET).parameters))
def test_every_argument_of_streaming_dataset_has_its_row(argument):
    table = README.split("| StreamingDataset | here |")[1]

    assert f"`{argument}`" in table


def test_an_argument_of_streaming_dataset_that_is_none_here_is_refused_with_its_place():
    table = README.split("| StreamingDataset | here |")[1].split("## Speed")[0]
    refused = 0
    for names, here in re.findall(r"^\| (`.*?) \| (.*) \|$", table, flags=re.MULTILINE):
        places = re.findall(r"\b(?:Order|Mixing|Buffers|World)\(|each `Stream`", here)
        for name in re.findall(r"`([a-z_]+)`", names) if places else ():
            with pytest.raises(ConfigError) as refusal:
                PackedStreamingDataset(**{name: 1})
            assert re.search(rf"^{name}=1: no argument of .*, set it with ", str(refusal.value))
            assert places[0].replace("`", "") in str(refusal.value)
            refused += 1
    assert refused > 10
