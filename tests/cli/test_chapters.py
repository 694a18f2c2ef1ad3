"""`streampack plan` and `simulate` on chapters print exactly what the run will do."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from itertools import islice

import pytest
import yaml

from streampack import ConfigError, PackedDataLoader, World
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from tests.helpers.datasets import write_chapter_streams
from tests.helpers.verbs import call_verb

VERBS = ("plan", "simulate")


@pytest.fixture
def config(tmp_path):
    """A function that writes a config of two chapters."""
    folders = write_chapter_streams(tmp_path)

    def write(last=None):
        run = {
            "streams": [{"name": name, "local": folders[name]} for name in ("web", "math")],
            "packing": {"max_seq_len": 64},
            "mixing": {"global_batch_size": 8, "batching_method": "stratified"},
            "batch_size": 2,
            "chapters": [
                {"weights": {"web": 3, "math": 0 if last else 1}, "steps": 30},
                last or {"weights": {"web": 1, "math": 1}, "steps": 40},
            ],
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run))
        return path

    return write


def call(*arguments) -> str:
    return " ".join(call_verb(*arguments).split())


def loader_of(path) -> PackedDataLoader:
    return PackedDataLoader(build_dataset(read_config(path), path, World()))


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_that_ends_with_passes_shows_them_and_has_as_many_steps(config, verb):
    path = config({"weights": {"math": 1}, "passes": 1})
    described = json.loads(call(verb, path, "--json"))
    assert described["chapters"][1]["streams"]["math"]["passes"] == 1
    assert re.search(r"math .* 1\.00", call(verb, path))
    steps = sum(chapter["steps"] for chapter in described["chapters"])
    assert steps * 4 == len(loader_of(path)) == len(list(loader_of(path)))


def test_first_steps_are_simulated_with_the_passes_through_each_stream(config):
    path = config()
    numbers = json.loads(call("simulate", path, "--steps", "160", "--json"))
    loader = loader_of(path)
    for _ in islice(loader, 160):
        pass
    delivered = {name: each["samples"] for name, each in loader.stats()["streams"].items()}
    repeats = {name: each["repeats"] for name, each in numbers["streams"].items()}
    assert repeats == {"web": delivered["web"] / 400, "math": delivered["math"] / 90}
    shown = call("simulate", path, "--steps", "160")
    assert "repeats" in shown
    assert f"{repeats['math']:.2f}" in shown


def test_a_config_limits_repeats_by_name(config):
    path = config()
    run = yaml.safe_load(path.read_text())
    for most in (100, 0.5):
        mixing = run["mixing"] | {"max_repeats": {"math": most}}
        path.write_text(yaml.safe_dump(run | {"mixing": mixing}))
        refused = pytest.raises(ConfigError, match=r"run\.yaml: .* max_repeats allows 0\.5")
        with refused if most < 1 else nullcontext():
            call("plan", path)


def test_a_plan_says_where_a_state_stands(config, tmp_path):
    path, state = config(), tmp_path / "state.json"
    loader = loader_of(path)
    for _ in islice(loader, 4 * 33):
        pass
    state.write_text(json.dumps(loader.state_dict()))
    assert "the state is in chapter 1, at its step 3" in call("plan", path, "--state", state)
