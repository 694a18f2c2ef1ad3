"""`loader.amend` on real ranks must be the same everywhere, or every rank refuses it by name."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from streampack import (
    AttentionCost,
    Balance,
    Chapter,
    ConfigError,
    PackedDataLoader,
    Ramp,
    World,
)
from tests.helpers.datasets import chapter_dataset, write_chapter_streams
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.processes

RANKS = 2
CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=6),
    Chapter(weights={"web": Ramp(3, 1), "math": Ramp(0, 2)}, steps=5),
]
AMENDED = {"math": 1, "web": 1}


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    write_chapter_streams(folder)
    return folder


def make(streams: Path, rank: int, num_ranks: int, method: str, balanced: bool) -> PackedDataLoader:
    dataset = chapter_dataset(
        {name: str(streams / name) for name in ("web", "code", "math")},
        CHAPTERS,
        method=method,
        balance=Balance(within="batch", cost=AttentionCost(hidden_size=64)) if balanced else None,
        world=World(rank=rank, num_ranks=num_ranks),
    )
    return PackedDataLoader(dataset)


def rows_of(batch: dict[str, Any]) -> tuple[int, int, list[str]]:
    """The global batch that a batch belongs to, and its rows."""
    rows = [row.numpy().tobytes().hex() for row in batch["tokens"]]
    return batch["epoch"], (batch["position"] - 1) // 16, rows


def by_step(seen: list[list[Any]]) -> dict[tuple[int, int], Counter]:
    steps: dict[tuple[int, int], Counter] = {}
    for epoch, step, rows in [batch for rank in seen for batch in rank]:
        steps.setdefault((epoch, step), Counter()).update(rows)
    return steps


def amend_on_all(rank: int, folder: Path, *, method: str, balanced: bool, at: int) -> Any:
    loader, got, gathered = make(folder, rank, RANKS, method, balanced), [], None
    for batch in loader:
        got.append(rows_of(batch))
        if len(got) == at:
            loader.amend(weights=AMENDED)
        if len(got) == at + 4 * RANKS:
            gathered = loader.gather_state()
            break
    resumed = make(folder, rank, RANKS, method, balanced)
    resumed.load_state_dict(json.loads(json.dumps(gathered)))
    got += [rows_of(batch) for batch in resumed]
    return got


QUICK = {("random", False, 5), ("per_stream", False, 24), ("stratified", True, 24)}


@pytest.mark.parametrize(
    ("method", "balanced", "at"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(["random", "stratified", "per_stream"], [False, True], [5, 24])
    ],
)
def test_an_amendment_on_all_ranks_is_that_of_one(streams, tmp_path, method, balanced, at):
    for name in ("web", "code", "math"):
        (tmp_path / name).symlink_to(streams / name)
    seen = on_ranks(tmp_path, amend_on_all, RANKS, method=method, balanced=balanced, at=at)
    loader, alone = make(streams, 0, 1, method, balanced=False), []
    for batch in loader:
        alone.append(rows_of(batch))
        if len(alone) == at * RANKS:
            loader.amend(weights=AMENDED)
    assert len(seen[0]) == len(seen[1]) == 4 * 11
    assert by_step(seen) == by_step([alone])


def amend_differently(rank: int, folder: Path, *, what: str) -> Any:
    """Make different changes, which are refused, and then follow the message."""
    loader, told, num = make(folder, rank, RANKS, "stratified", balanced=False), "", 0
    for num, _ in enumerate(loader, start=1):
        if num == (4 if what == "position" and rank == 1 else 5):
            weights: Any = AMENDED
            if what == "weights" and rank == 1:
                weights = {"math": 1, "web": 2}
            if what == "no weights" and rank == 1:
                weights = [1, 2]
            try:
                loader.amend(weights=weights)
            except ConfigError as error:
                told = str(error)
        if num == 8:
            assert len(loader.state_dict()["chapters"]) == 2  # nothing changed
            loader.amend(weights=AMENDED)
    return [told, num, len(loader.state_dict()["chapters"])]


@pytest.mark.parametrize("what", ["weights", "position", "no weights"])
def test_ranks_that_amend_differently_are_refused_by_name_on_all_ranks(streams, tmp_path, what):
    for name in ("web", "code", "math"):
        (tmp_path / name).symlink_to(streams / name)
    seen = on_ranks(tmp_path, amend_differently, RANKS, what=what)
    name = "position" if what == "position" else "weights"
    for told, num, chapters in seen:
        assert told.startswith(f"ranks have different {name}")
        assert "rank" in told.partition(":")[2]
        assert "after the same batch, on every rank" in told
        assert (num, chapters) == (44, 3)
