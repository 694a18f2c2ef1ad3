"""Packs, states, import paths and logger names must not change between releases."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from streampack import (
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    World,
)
from tests.helpers.golden.cases import (
    CASES,
    EDITS,
    EXPECTED,
    SAVED_AT,
    batches,
    planned,
    run,
    write_streams,
)

GOLDEN = json.loads(EXPECTED.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden")
    write_streams(path)
    return path


def test_every_case_is_pinned():
    assert list(GOLDEN) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_batches_and_states_are_those_of_the_release_before(case, folder):
    found = run(case, folder)
    assert found["batches"] == GOLDEN[case]["batches"]
    assert json.dumps(found["states"]) == json.dumps(GOLDEN[case]["states"])


@pytest.mark.parametrize(
    ("case", "number"),
    [
        pytest.param(case, number, marks=[] if at == place % len(SAVED_AT) else [pytest.mark.slow])
        for place, case in enumerate(CASES)
        for at, number in enumerate(SAVED_AT)
    ],
)
def test_a_state_of_the_release_before_resumes(case, number, folder):
    loader = PackedDataLoader(CASES[case](folder))
    loader.load_state_dict(GOLDEN[case]["states"][str(number)])
    # A state after an edit includes it, so only later edits are made here.
    rest = [hashed for hashed, _ in batches(loader, EDITS.get(case), done=number)]
    assert rest == GOLDEN[case]["batches"][number:]


@pytest.mark.parametrize("case", ["spread", "spread-carry"])
@pytest.mark.parametrize("num_workers", [1])
def test_a_state_resumes_with_its_packer_where_the_dataset_asks_for_none(case, num_workers, folder):
    options = {"order": Order(seed=17)}
    if case == "spread-carry":
        options = {
            "mixing": Mixing(epoch_end="carry", epoch_size=200, global_batch_size=8),
            "order": Order(seed=17, num_lanes=4),
            "world": World(rank=1, num_ranks=2),
        }
    for number in SAVED_AT:
        loader = PackedDataLoader(planned(**options)(folder), num_workers=num_workers)
        loader.load_state_dict(GOLDEN[case]["states"][str(number)])
        rest = [hashed for hashed, _ in batches(loader, done=number)]
        assert rest == GOLDEN[case]["batches"][number:]


def test_the_documented_logger_reports_label_columns_that_are_not_used(caplog):
    assert "streampack.streams.label_columns" in Path("docs/loss.md").read_text(encoding="utf-8")
    item = {"tokens": [1, 2], "labels": [1, 2]}
    with caplog.at_level(logging.WARNING, "streampack.streams.label_columns"):
        list(PackedIterableDataset([IterableStream([item])], packing=Packing(max_seq_len=8)))
    assert [record.name for record in caplog.records] == ["streampack.streams.label_columns"]
