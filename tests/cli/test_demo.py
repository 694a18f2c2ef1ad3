"""The parts of the demo: its texts, its model, and the whole."""

from __future__ import annotations

import signal
from itertools import islice
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from streampack.cli import demo
from streampack.cli.app import build_app
from streampack.cli.demo.prepare import SOURCES

CONFIG = Path(demo.__file__).with_name("demo.yaml")


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_text_and_the_same_text_again(name):
    first = list(islice(SOURCES[name](), 50))

    assert len(first) == 50
    assert all(text.strip() for text in first)
    assert first == list(islice(SOURCES[name](), 50))


@pytest.mark.slow
def test_the_whole_demo_goes_on_bit_for_bit(tmp_path, monkeypatch):
    written = yaml.safe_load(CONFIG.read_text())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(written))

    done = CliRunner().invoke(build_app(), ["demo", "--config", "demo.yaml", "--steps", "8"])

    assert done.exception is None, done.output
    assert "was killed: SIGKILL" in done.output
    assert "bit for bit, those of a run that never stopped" in done.output.replace("\n", " ")
    assert (tmp_path / "demo-output" / "report.html").read_text().count("<figure") == 9


@pytest.mark.slow
def test_a_run_of_chapters_is_killed_edited_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(build_app(), ["demo", "--config", str(CONFIG), "--chapters"])

    assert done.exception is None, done.output
    assert f"then was killed: {signal.SIGKILL.name}" in done.output
    assert "those of a run of the edited chapters" in done.output.replace("\n", " ")
