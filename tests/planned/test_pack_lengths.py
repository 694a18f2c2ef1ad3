"""Streams that set their own pack length, from the constructor to the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import PackedDataLoader
from streampack.errors import ConfigError, ResumeError
from streampack.planned.dataset import PackedStreamingDataset
from streampack.report import simulate
from tests.helpers.conformance import (
    Written,
    all_rows,
    check_tokens,
    make,
    rows,
    show,
    worlds,
    write_streams,
)
from tests.helpers.examples import crossed, examples

SIZE, BATCH = 32, 8
OWN = [{}, {"max_seq_len": 2 * SIZE}, {"max_seq_len": 8 * SIZE}]
METHODS = ["device_per_stream", "per_stream"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    some = np.random.default_rng(3)
    lengths = [
        some.integers(1, longest, num).tolist()
        for num, longest in [(500, 60), (200, 150), (80, 500)]
    ]
    return write_streams(tmp_path_factory.mktemp("streams"), lengths, size_limit=1 << 13)


def shaped(
    written: Written, method: str = "device_per_stream", **options: Any
) -> PackedStreamingDataset:
    mixing = {"batching_method": method, "global_batch_size": 48, **options.pop("mixing", {})}
    return make(
        written,
        weights=options.pop("weights", OWN),
        max_seq_len=SIZE,
        mixing=mixing,
        **{"batch_size": BATCH, **options},
    )


def test_a_batch_of_no_whole_rows_is_refused_with_the_name_of_the_longest_stream(written):
    with pytest.raises(ConfigError, match=r"^stream 's2': "):
        shaped(written, batch_size=4)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_holds_rows_of_its_streams_own_length(written, method):
    shapes = set()
    for batch in shaped(written, method):
        check_tokens(batch, written)
        num_rows, row_tokens = batch["tokens"].shape
        assert num_rows * row_tokens == BATCH * SIZE
        streams = set(batch["segments"][:, 1].tolist())
        assert len(streams) <= 1
        for stream in streams:
            assert row_tokens == OWN[stream].get("max_seq_len", SIZE)
        assert batch["cu_seqlens"][-1] == BATCH * SIZE
        shapes.add((num_rows, row_tokens))

    assert shapes == {(8, 32), (4, 64), (1, 256)}


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_labels_of_a_column_have_the_shape_of_the_rows(written, num_workers):
    labelled = [{"labels": "tokens", "labels_shifted": False, **own} for own in OWN]
    dataset = shaped(written, weights=labelled)

    for batch in PackedDataLoader(dataset, num_workers=num_workers):
        assert batch["labels"].shape == batch["tokens"].shape
        check_tokens(batch, written)


@pytest.mark.thorough
@pytest.mark.parametrize(("epoch_end", "num_ranks"), crossed(["pad", "drop", "carry"], [3, 2, 1]))
def test_simulation_counts_what_the_ranks_deliver(written, num_ranks, epoch_end):
    mixing = {"epoch_end": epoch_end}
    ranks = [shaped(written, world=world, mixing=mixing) for world in worlds(num_ranks)]
    loaders = [PackedDataLoader(rank) for rank in ranks]
    steps = list(zip(*loaders, strict=True))
    stats = [loader.stats() for loader in loaders]

    simulated = simulate(shaped(written, world=worlds(num_ranks)[0], mixing=mixing))

    assert simulated["steps"] == len(steps)
    for key in ("packs", "tokens"):
        assert simulated[key] == sum(own[key] for own in stats)
    slots = len(steps) * num_ranks * BATCH * SIZE
    assert simulated["padding_tokens"] == slots - simulated["tokens"]
    for stream in simulated["streams"]:
        own = [each["streams"][stream] for each in stats]
        assert simulated["streams"][stream]["samples"] == sum(row["samples"] for row in own)
    real = sum(
        shape[0] * shape[1]
        for step in steps
        for batch in step
        for shape in [(len(set(batch["segments"][:, 0].tolist())), batch["tokens"].shape[1])]
    )
    assert simulated["fill"] == simulated["tokens"] / real
    assert simulated["padding_packs"] * SIZE == slots - real


def test_truncated_and_dropped_samples_are_those_longer_than_their_streams_packs(written):
    for overflow, key in (("truncate", "truncated"), ("drop", "dropped")):
        loader = PackedDataLoader(shaped(written, packing={"overflow": overflow}))
        for _ in loader:
            pass
        counts = [stream[key] for stream in loader.stats()["streams"].values()]
        limits = [own.get("max_seq_len", SIZE) for own in OWN]
        assert counts == [
            sum(length > limit for length in lengths)
            for lengths, limit in zip(written.lengths, limits, strict=True)
        ]


def test_a_length_equal_to_the_packings_changes_nothing(written):
    plain, equal = (shaped(written, weights=own) for own in ([{}] * 3, [{"max_seq_len": SIZE}] * 3))

    assert equal.state_dict() == plain.state_dict()
    assert [show(batch) for batch in equal] == [show(batch) for batch in plain]


def test_a_world_whose_batches_would_mix_lengths_is_refused_with_sizes_that_work(written):
    state = shaped(written, batch_size=16).state_dict()

    for batch_size in (24, 32):
        with pytest.raises(ResumeError, match="set batch_size to 8 or 16"):
            shaped(
                written, batch_size=batch_size, mixing={"global_batch_size": None}
            ).load_state_dict(state)
    fitting = shaped(written, batch_size=8)
    fitting.load_state_dict(state)
    assert next(iter(fitting))["position"] == 8


@pytest.mark.thorough
@examples(5, many=15)
@given(data=st.data())
def test_any_world_continues_where_another_stopped(written, data):
    draw = data.draw
    lanes, method = draw(st.integers(1, 5), "lanes"), draw(st.sampled_from(METHODS), "method")
    mixing = {
        "global_batch_size": 16 * lanes * draw(st.integers(1, 2), "global batch"),
        "epoch_end": draw(st.sampled_from(["pad", "drop", "carry"]), "epoch_end"),
        "weight_unit": draw(st.sampled_from(["samples", "tokens"]), "weight_unit"),
    }
    overflow = draw(st.sampled_from(["split", "truncate"]), "overflow")
    order = {"num_lanes": lanes, "pack_shuffle": draw(st.sampled_from([None, 0]), "pack_shuffle")}
    options = {"mixing": mixing, "packing": {"overflow": overflow}, "order": order}
    first = shaped(written, method, batch_size=16, **options)
    first.set_epoch(draw(st.integers(0, 2), "epoch"))
    states, expected = [first.state_dict()], []
    for batch in first:
        expected.append(rows(batch))
        states.append(first.state_after(batch))

    place = draw(st.integers(0, len(expected) - 1), "place")
    nodes, per_node = draw(st.integers(1, 3), "nodes"), draw(st.sampled_from([1, 2, 4]))
    batch_size = draw(st.sampled_from([8, 16]), "batch_size")
    ranks = [
        shaped(written, method, batch_size=batch_size, world=world, **options)
        for world in worlds(nodes * per_node, nodes)
    ]
    for rank in ranks:
        rank.load_state_dict(states[place])
    rest = [row for batch in expected[place:] for row in batch]
    assert all_rows(ranks, states[place]["position"]) == rest
