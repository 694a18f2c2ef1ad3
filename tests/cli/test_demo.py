"""The parts of the demo: its texts, its model, and the whole."""

from __future__ import annotations

import signal
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from streampack.cli import demo
from streampack.cli.app import build_app
from streampack.cli.demo.prepare import SOURCES
from streampack.cli.demo.train import SmallDecoder
from tests.helpers import builders

CONFIG = Path(demo.__file__).with_name("demo.yaml")
LENGTHS = [5, 40, 7, 30, 12, 33, 1, 64, 9, 18] * 8


@pytest.fixture
def config(tmp_path):
    """A run over one small stream, small enough to train on."""
    path, _ = builders.write_stream_files(tmp_path / "stream", LENGTHS, dtype="uint8")
    described = {
        "streams": [{"local": str(path)}],
        "packing": {"max_seq_len": 64},
        "batch_size": 2,
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(described))
    return file


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_text_and_the_same_text_again(name):
    first = list(islice(SOURCES[name](), 50))

    assert len(first) == 50
    assert all(text.strip() for text in first)
    assert first == list(islice(SOURCES[name](), 50))


def test_a_model_sees_a_sample_in_a_pack_as_it_sees_it_alone():
    torch.manual_seed(0)
    model = SmallDecoder(50, dim=32, num_layers=2, num_heads=2)
    lengths = [5, 9, 2]
    tokens = torch.randint(0, 50, (1, sum(lengths)))
    input_pos = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))[None]

    packed = model(tokens, input_pos, ids)
    alone = [
        model(part, torch.arange(part.shape[1])[None], torch.ones_like(part))
        for part in tokens.split(lengths, dim=1)
    ]

    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=0)


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
