"""The laws over real files for random combinations of the options that change packs.

Without `balance`, every world gets the same packs in the same order; with it, each global batch has
the same set of packs. Resuming at any step continues bit for bit.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import AttentionCost, Balance, ConfigError, PackCost
from streampack.planned.dataset import PackedStreamingDataset
from tests.helpers import conformance
from tests.helpers.conformance import Written, show, worlds
from tests.helpers.examples import examples

METHODS = ("random", "stratified", "per_stream", "device_per_stream")
NUM_SAMPLES = (300, 120)
GLOBAL_BATCH = 16
BATCH_SIZE = 2
COST = AttentionCost(hidden_size=20)
MAX_COST = 100  # of packs of up to 96 tokens; one sample of 64 costs 82


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(4)
    lengths = [rng.integers(1, 60, 300).tolist(), rng.integers(1, 150, 120).tolist()]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    method = draw(st.sampled_from(METHODS))
    packing: dict[str, Any] = {"buffer_tokens": draw(st.sampled_from([200, None]))}
    weights = None
    if draw(st.booleans()):
        packing |= {"cost": PackCost(MAX_COST, hidden_size=20)}
    else:
        packers = [None, "next_fit", "two_tiers", "knapsack", "concat"]
        packing["method"] = draw(st.sampled_from(packers))
        if packing["method"] == "two_tiers":
            packing["short_seq_len"] = 16
        if method in ("per_stream", "device_per_stream") and draw(st.booleans()):
            weights = [{}, {"max_seq_len": 128}]
    return {
        "weights": weights,
        "packing": packing,
        "mixing": {
            "batching_method": method,
            "global_batch_size": GLOBAL_BATCH,
            "epoch_end": draw(st.sampled_from(["pad", "drop", "carry"])),
        },
        "order": {
            "num_lanes": draw(st.sampled_from([1, 2, 4])),
            "pack_shuffle": draw(st.sampled_from([None, 0, 1, 7, 40])),
        },
        # A custom format, since some of the named ones refuse these combinations.
        "batch_format": lambda batch: batch,
    }


def ranks_of(
    written: Written, num_ranks: int, num_nodes: int, **options: Any
) -> list[PackedStreamingDataset]:
    return [
        conformance.make(written, batch_size=BATCH_SIZE, world=world, **options)
        for world in worlds(num_ranks, num_nodes)
    ]


def global_batches(ranks: list[PackedStreamingDataset]) -> list[list[tuple[bytes, ...]]]:
    per_batch, found = GLOBAL_BATCH // BATCH_SIZE // len(ranks), []
    for number, step in enumerate(conformance.steps(conformance.in_slot_order(ranks, 0))):
        if number % per_batch == 0:
            found.append([])
        for batch in step:
            found[-1] += conformance.rows(batch)
    return found


def rest_of_each(ranks: list[PackedStreamingDataset], skipped: int) -> list[Any]:
    return [[show(batch) for batch in islice(rank, skipped, None)] for rank in ranks]


@examples(6, many=40)
@given(
    chosen=options(),
    within=st.sampled_from([None, "rank", "node", "batch"]),
    shape=st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 4)]),
    epoch=st.integers(0, 2),
    share=st.floats(0, 1),
)
def test_packs_of_all_options_are_elastic_and_resume_exactly(
    written, chosen, within, shape, epoch, share
):
    balance = None if within is None else Balance(within=within, cost=COST)
    lone = ranks_of(written, 1, 1, **chosen)
    lone[0].set_epoch(epoch)
    num_ranks, num_nodes = shape
    start = lone[0].state_dict()

    def begun(state: dict[str, Any]) -> list[PackedStreamingDataset]:
        ranks = ranks_of(written, num_ranks, num_nodes, **chosen, balance=balance)
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
        return ranks

    try:
        expected = global_batches(lone)
    except ConfigError as error:
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            global_batches(begun(start))
        return
    found = global_batches(begun(start))
    if balance is not None:
        expected, found = ([sorted(each) for each in own] for own in (expected, found))
    assert found == expected
    if chosen["mixing"]["epoch_end"] == "pad":
        shown = [row for each in found for row in each]
        if chosen["weights"] is None:
            conformance.check_exactly_once(shown, written, NUM_SAMPLES)
    # Every rank loads the state of one rank, since a state describes the whole run.
    ranks = begun(start)
    num_steps = int(share * (len(ranks[0]) - 1))
    batches = list(islice(ranks[0], num_steps))
    state = ranks[0].state_after(batches[-1]) if batches else start
    assert rest_of_each(begun(state), 0) == rest_of_each(begun(start), num_steps)
