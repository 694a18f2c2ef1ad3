"""One pass of a stream as the last chapter of a run, judged by the samples that it delivers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streampack import (
    Chapter,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.testing import assert_exactly_once
from tests.helpers.conformance import Written, write_streams
from tests.helpers.examples import crossed

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
FIRST = 8  # batches of a rank alone before the last chapter


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 150, 400).tolist(), rng.integers(1, 60, 90).tolist()]
    return write_streams(tmp_path_factory.mktemp("streams"), lengths)


def loader_of(
    written: Written, method: str, num_lanes: int, rank: int = 0, num_ranks: int = 1
) -> PackedDataLoader:
    """A run of two steps of the first stream, and then of one pass of the second."""
    web, math = map(str, written.paths)
    return PackedDataLoader(
        PackedStreamingDataset(
            [
                Stream(name="web", local=web),
                Stream(name="math", local=math),
            ],
            packing=Packing(max_seq_len=64),
            chapters=[Chapter(weights={"web": 1}, steps=2), Chapter(weights={"math": 1}, passes=1)],
            mixing=Mixing(global_batch_size=8, batching_method=method),
            order=Order(seed=17, num_lanes=num_lanes),
            batch_size=2,
            world=World(rank=rank, num_ranks=num_ranks),
        )
    )


def tokens_of(batches: Sequence[dict[str, Any]]) -> list[bytes]:
    return [batch["tokens"].numpy().tobytes() for batch in batches]


@pytest.mark.parametrize(("method", "num_lanes"), crossed(METHODS, [2, 1]))
def test_one_pass_as_the_last_chapter_delivers_each_sample_once(written, method, num_lanes):
    loader = loader_of(written, method, num_lanes)
    whole, states = [], []
    for batch in loader:
        whole.append(batch)
        states.append(json.dumps(loader.state_dict()))
    assert len(whole) == len(loader_of(written, method, num_lanes))
    assert {int(row[1]) for batch in whole[:FIRST] for row in batch["segments"]} == {0}
    assert_exactly_once(whole[FIRST:], written.lengths, [0, 90])

    for number in (FIRST, len(whole) - 3, len(whole) - 1, len(whole)):
        resumed = loader_of(written, method, num_lanes)
        resumed.load_state_dict(json.loads(states[number - 1]))
        assert tokens_of(list(resumed)) == tokens_of(whole[number:])

    of_ranks = [list(loader_of(written, method, num_lanes, rank, 2)) for rank in range(2)]
    assert len(of_ranks[0]) == len(of_ranks[1])
    last = [batch for own in of_ranks for batch in own if batch["epoch"] == 1]
    assert_exactly_once(last, written.lengths, [0, 90])
