"""The demo: its texts, what it shows, and the examples that kill and resume it."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from streampack.cli.demo.prepare import SOURCES
from tests.helpers.verbs import call_verb

EXAMPLES = Path(__file__).parents[2] / "examples" / "demo"


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_text_and_the_same_text_again(name):
    first = list(islice(SOURCES[name](), 50))

    assert len(first) == 50
    assert all(text.strip() for text in first)
    assert first == list(islice(SOURCES[name](), 50))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["kill_and_resume.py", "8"], "bit for bit, those of a run that never stopped"),
        (["edit_chapters.py"], "bit for bit, those of a run of the edited chapters that never"),
    ],
)
def test_a_process_that_is_killed_goes_on_bit_for_bit(tmp_path, script, said):
    name, *arguments = script

    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert done.returncode == 0, done.stderr
    assert "was killed: SIGKILL" in done.stdout
    assert said in done.stdout.replace("\n", " ")


@pytest.mark.slow
def test_the_demo_shows_packs_and_writes_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    printed = call_verb("demo")

    assert "code" in printed
    assert "fill 99." in printed
    assert (tmp_path / "demo-output" / "report.html").read_text().count("<figure") == 8
