"""The laws over real files, in whole epochs, from the first shard to the last label.

The reference is a single process that reads a sequence alone. Every other way of reading it must
give the same packs, byte for byte.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streampack.errors import ConfigError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.testing import assert_exactly_once, assert_same_in_every_world
from tests.helpers import conformance
from tests.helpers.conformance import Written, all_rows, worlds
from tests.helpers.examples import crossed, examples

# Three workers on a machine of two cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

METHODS = ("random", "stratified", "per_stream", "device_per_stream")
# Ranks and nodes; the number of packs in an epoch is not a multiple of any of them.
WORLDS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 4), (8, 2)]
OF_A_METHOD = {
    "random": [(4, 4), (3, 1)],
    "stratified": [(4, 2)],
    "per_stream": [(8, 2)],
    "device_per_stream": [(2, 1), (4, 1)],
}
NUM_SAMPLES = (400, 160, 30)  # with 3 lanes the first is dealt, the others are shared
GLOBAL_BATCH = 48  # per_stream: a multiple of 2 * 8 lanes and of 2 * 3


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Written:
    rng = np.random.default_rng(0)
    # Samples of the second stream can be more than twice as long as a pack.
    lengths = [
        rng.integers(1, limit, count).tolist()
        for limit, count in zip((50, 150, 64), NUM_SAMPLES, strict=True)
    ]
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), lengths)


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Written:
    """Streams of one to five packs: first of 64 tokens, then of 128."""
    lengths = [[size] * num for size in (64, 128) for num in range(1, 6)]
    return conformance.write_streams(tmp_path_factory.mktemp("few"), lengths)


def make(written: Written, lanes: int, method: str, **options: Any) -> PackedStreamingDataset:
    mixing = {"batching_method": method, "global_batch_size": GLOBAL_BATCH}
    return conformance.make(written, mixing=mixing, order={"num_lanes": lanes}, **options)


def rows_of_workers(loaders: Sequence[Any]) -> list[tuple[bytes, ...]]:
    return [
        row
        for step in conformance.steps(loaders)
        for batch in step
        for row in conformance.rows(batch)
    ]


# The generated mixtures below have from one to nine lanes, and any world with any method.
@pytest.mark.parametrize("method", METHODS)
def test_every_world_delivers_every_chosen_token_once_and_the_same_packs(written, method):
    assert_exactly_once(make(written, 3, method), written.lengths, NUM_SAMPLES)
    worlds = OF_A_METHOD[method]
    assert_same_in_every_world(lambda world: make(written, 3, method, world=world), worlds)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_every_world_delivers_the_same_packs_with_each_method(written, method, lanes):
    assert_exactly_once(make(written, lanes, method), written.lengths, NUM_SAMPLES)
    assert_same_in_every_world(lambda world: make(written, lanes, method, world=world), WORLDS)


@pytest.mark.parametrize(
    ("method", "num_workers"),
    [
        ("random", 3),
        ("per_stream", 2),
        *(pytest.param(method, 2, marks=pytest.mark.slow) for method in METHODS[1::2]),
    ],
)
def test_any_number_of_workers_delivers_the_same_packs(written, method, num_workers):
    reference = all_rows([make(written, 3, method)])
    ranks = [make(written, 3, method, world=world) for world in worlds(2)]
    loaders = [PackedDataLoader(rank, num_workers=num_workers) for rank in ranks]
    assert rows_of_workers(loaders) == reference
    # With other loaders, each worker plans for itself.
    plain = DataLoader(make(written, 3, method), batch_size=None, num_workers=num_workers)
    assert rows_of_workers([plain]) == reference


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_kept_exactly_over_epochs_and_no_sample_is_seen_twice_as_often(written, method):
    weights = [{"repeat": 0.5}, {"choose": 200}, {"repeat": 2}]
    quotas = (200, 200, 60)
    dataset = make(written, 3, method, weights=weights)
    epochs = [all_rows([dataset]) for _ in range(4)]
    for epoch in epochs:
        conformance.check_exactly_once(epoch, written, quotas)
    everything = [row for epoch in epochs for row in epoch]
    conformance.check_exactly_once(everything, written, [4 * quota for quota in quotas])


@given(data=st.data())
@examples(5, many=30)
def test_the_sequence_of_packs_is_byte_equal_in_every_world(written, data):
    draw = data.draw
    method = draw(st.sampled_from(METHODS), "method")
    lanes = draw(st.integers(1, 9), "lanes")
    lane_turn = draw(st.integers(1, 4), "lane_turn")
    batch_size = draw(st.integers(1, 6), "batch_size")
    unit = int(np.lcm(batch_size, lane_turn)) * (lanes if method == "per_stream" else 1)
    mixing = {
        "batching_method": method,
        "global_batch_size": unit * draw(st.integers(1, 4), "global batch"),
        "epoch_end": draw(st.sampled_from(["pad", "drop", "carry"]), "epoch_end"),
        "weight_unit": draw(st.sampled_from(["samples", "tokens"]), "weight_unit"),
    }
    packing = {
        "method": draw(st.sampled_from([None, "next_fit"]), "packer"),
        "overflow": draw(st.sampled_from(["split", "truncate", "drop"]), "overflow"),
        "buffer_tokens": draw(st.sampled_from([64, 200, None]), "buffer_tokens"),
    }
    order = {"num_lanes": lanes, "shuffle": draw(st.booleans(), "shuffle")}
    options = {"mixing": mixing, "packing": packing, "order": order}
    epoch = draw(st.integers(0, 2), "epoch")
    first = conformance.make(written, batch_size=lane_turn, **options)
    first.set_epoch(epoch)
    start = first.state_dict()
    num_nodes = draw(st.integers(1, 4), "nodes")
    per_node = draw(st.integers(1, 4), "ranks per node")
    replication = draw(
        st.sampled_from([r for r in (1, 2, 3, 4) if per_node % r == 0]), "replication"
    )
    ranks = [
        conformance.make(written, batch_size=batch_size, world=world, **options)
        for world in worlds(num_nodes * per_node, num_nodes, replication)
    ]
    for rank in ranks:
        rank.load_state_dict(start)
    try:
        expected = all_rows([first])
    except ConfigError as error:
        # With "drop", a small stream may not fill a single batch; then every rank refuses it.
        for rank in ranks:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                next(iter(rank))
        return
    assert all_rows(ranks) == expected


@examples(8, many=40)
@given(
    method=st.sampled_from(METHODS),
    epoch_end=st.sampled_from(["pad", "drop"]),
    numbers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    has_lengths=st.booleans(),
    lanes=st.integers(1, 4),
    world=st.sampled_from(WORLDS),
)
@example(
    method="per_stream", epoch_end="pad", numbers=[1, 7], has_lengths=True, lanes=2, world=(2, 1)
)
def test_streams_of_one_to_five_packs_are_byte_equal_in_every_world(
    few, method, epoch_end, numbers, has_lengths, lanes, world
):
    own = Written(
        paths=tuple(few.paths[number] for number in numbers),
        tokens=tuple(few.tokens[number] for number in numbers),
    )
    has_lengths &= method in ("per_stream", "device_per_stream")
    mixing = {"batching_method": method, "global_batch_size": 2 * lanes, "epoch_end": epoch_end}
    options = {
        "weights": [{"max_seq_len": 128} if has_lengths and n > 4 else {} for n in numbers],
        "mixing": mixing,
        "order": {"num_lanes": lanes},
    }
    ranks = [conformance.make(own, world=each, **options) for each in worlds(*world)]
    try:
        expected = all_rows([conformance.make(own, **options)])
    except ConfigError as error:
        for rank in ranks:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                next(iter(rank))
        return
    assert all_rows(ranks) == expected
    if epoch_end == "pad":
        conformance.check_exactly_once(expected, own, [len(tokens) for tokens in own.tokens])


@pytest.mark.parametrize(("epoch_end", "num_ranks"), crossed(["pad", "drop", "carry"], [3, 2]))
def test_all_ranks_take_as_many_steps_to_the_same_positions(written, epoch_end, num_ranks):
    mixing = {"epoch_end": epoch_end, "global_batch_size": 20}
    for epoch in range(2):
        places = []
        for world in worlds(num_ranks):
            rank = conformance.make(written, mixing=mixing, world=world, order={"num_lanes": 3})
            rank.set_epoch(epoch)
            places.append([(batch["epoch"], batch["position"]) for batch in rank])
        assert all(own == places[0] for own in places)
        assert {own for own, _ in places[0]} == {epoch}
        assert [p for _, p in places[0]] == sorted({p for _, p in places[0]})


@pytest.mark.parametrize("method", METHODS)
def test_with_carry_nothing_is_lost_or_said_twice_between_epochs(written, method):
    mixing = {"epoch_end": "carry", "batching_method": method, "global_batch_size": 8}
    # In order, so that the packer only has samples of the last passes; a single lane, since lanes
    # drift apart; and no window, since the last epoch would end in the middle of one.
    options = {"packing": {"method": "next_fit"}, "order": {"pack_shuffle": 0}}
    dataset = conformance.make(written, mixing=mixing, **options)
    segments = conformance.segments_of([row for _ in range(5) for row in all_rows([dataset])])
    for stream, lengths in enumerate(written.lengths):
        own = segments[segments[:, 0] == stream, 1:]
        own = own[np.lexsort((own[:, 2], own[:, 1], own[:, 0]))]
        same = (own[1:, :2] == own[:-1, :2]).all(axis=1)
        ends = own[:, 2] + own[:, 3]
        assert (own[1:, 2][same] == ends[:-1][same]).all(), "a piece is missing or said twice"
        assert (own[1:, 2][~same] == 0).all(), "a sample's beginning is missing"
        num_whole = int(own[:, 0].max()) - 1
        assert num_whole >= 1
        assert own[own[:, 0] < num_whole, 3].sum() == num_whole * sum(lengths)


@pytest.mark.parametrize(("method", "lanes"), crossed(METHODS, [1, 3]))
def test_compressed_streams_without_lengths_give_the_same_packs(tmp_path, method, lanes):
    rng = np.random.default_rng(2)
    # One length per stream, so that the byte counts and the lengths give the same shares of tokens.
    lengths = [rng.integers(1, 90, 150).tolist()] * 2
    written = conformance.write_streams(tmp_path / "with", lengths, compression="zstd")
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    paths = tuple(tmp_path / "without" / path.name for path in written.paths)
    for path in paths:
        (path / "lengths.bin").unlink()
    without = Written(paths=paths, tokens=written.tokens)
    found = all_rows([make(without, lanes, method)])
    conformance.check_exactly_once(found, written, (150, 150))
    assert found == all_rows([make(written, lanes, method)])
    assert len(make(without, lanes, method)) == len(make(written, lanes, method))


@pytest.mark.parametrize("positions", ["restart", "continue"])
@pytest.mark.parametrize("method", ["best_fit_decreasing", "concat"])
def test_every_token_is_its_own_and_every_label_the_samples_next_one(written, method, positions):
    packing = {"method": method, "positions": positions, "padding_id": 7}
    for batch in conformance.make(written, packing=packing):
        conformance.check_tokens(batch, written, padding_id=7)
        starts = input_positions(batch, goes_on=positions == "continue")
        np.testing.assert_array_equal(batch["input_pos"].numpy(), starts)


def input_positions(batch: dict[str, Any], *, goes_on: bool) -> np.ndarray:
    """Positions as documented: from 0 in each segment, or continued at a cut; padding from 0."""
    num_rows, num_slots = batch["tokens"].shape
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for row, _, _, _, start, length in batch["segments"].tolist():
        first = start if goes_on else 0
        rows[row] += range(first, first + length)
    return np.array([own + list(range(num_slots - len(own))) for own in rows])
