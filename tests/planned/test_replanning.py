"""A lane without a snapshot is planned from its start where that tokenizes nothing twice."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from streampack import PackedDataLoader, ResumeError
from streampack.lookback import at
from streampack.testing.shown import rows, worlds
from streampack.texts import units
from tests.helpers.texts import dataset_of, source_of, write_files

CARRY = {"mixing": {"epoch_end": "carry"}, "order": {"num_lanes": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def tiny_shards(monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 100)


def lazy(folder, cache, world=None):
    return dataset_of(source_of(folder, "rows.jsonl", cache, lengths="lazy"), world, **CARRY)


def num_made(cache):
    return sum(path.is_file() for path in (cache / "tokens").glob("??/*"))


def first_refused(dataset):
    """Return the first step that `at` refuses."""
    for step in range(100):
        try:
            at(dataset, step)
        except ResumeError:
            return step
    raise AssertionError("no step was refused")


def test_steps_of_the_first_block_of_each_lane_cost_no_further_shards(folder, tmp_path):
    at(lazy(folder, tmp_path), 0)
    before = num_made(tmp_path)
    dataset = lazy(folder, tmp_path)
    assert before < dataset.streams.opened[0].num_shards - 8
    assert first_refused(dataset) > 1
    assert num_made(tmp_path) <= before + 8  # how far a block goes is an estimate


def test_what_the_cache_has_is_planned_from_the_start(folder, tmp_path):
    last = first_refused(lazy(folder, tmp_path / "other")) + 2
    loaders = [
        PackedDataLoader(lazy(folder, tmp_path, world), check_ranks=False) for world in worlds(2, 2)
    ]
    for loader in loaders:
        whole = list(islice(loader, 2 * last))
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    elsewhere = lazy(folder, tmp_path / "new", worlds(2, 2)[1])
    with pytest.raises(ResumeError, match="would be tokenized again"):
        elsewhere.load_state_dict(states[0])
    dataset_of(source_of(folder, "rows.jsonl", tmp_path, lengths="eager"))
    here = lazy(folder, tmp_path, worlds(2, 2)[1])
    here.load_state_dict(states[0])
    rest = [rows(batch) for batch in islice(PackedDataLoader(here, check_ranks=False), 4)]
    other = lazy(folder, tmp_path, worlds(2, 2)[1])
    other.load_state_dict(states[1])
    assert rest == [rows(b) for b in islice(PackedDataLoader(other, check_ranks=False), 4)]
    before = num_made(tmp_path)
    assert len(at(lazy(folder, tmp_path), last).rows) == len(whole[0]["tokens"]) * 4
    assert num_made(tmp_path) == before
