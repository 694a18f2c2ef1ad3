"""With batches of one stream, streams never mix, even if one ends in the middle of a batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    Balance,
    ConfigError,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.plan.lane_ends import count_slots
from streampack.report import simulate
from streampack.types import SAMPLE, START, STREAM
from tests.helpers.builders import write_stream_files
from tests.helpers.examples import crossed, examples
from tests.helpers.planning import all_packs, epoch_sequence, recipe, world_views

SIZE, RUN = 64, 12
METHODS = ["device_per_stream", "per_stream"]
LENGTHS = [
    np.random.default_rng(seed).integers(1, longest + 1, num)
    for seed, (num, longest) in enumerate([(2500, 60), (1300, 150), (50, 90)])
]

methods = st.sampled_from(METHODS)
lanes = st.sampled_from([1, 2, 3, 4])


def make(method: str, epoch_end: str, num_lanes: int = 1, **options):
    return recipe(
        options.pop("lengths", LENGTHS),
        mixing=Mixing(batching_method=method, epoch_end=epoch_end),
        packing=options.pop("packing", Packing(max_seq_len=SIZE)),
        num_lanes=num_lanes,
        lane_turn=RUN,
        global_batch_size=2 * num_lanes * RUN,
        **options,
    )


@examples(6, many=20)
@given(method=methods, num_lanes=lanes, seed=st.integers(0, 9))
def test_drop_leaves_out_less_than_a_run_of_each_lane_and_stream_and_counts_it(
    method, num_lanes, seed
):
    order = Order(seed=seed)
    every = all_packs(make(method, "pad", num_lanes, order=order), world_views(1, RUN))
    r = make(method, "drop", num_lanes, order=order)
    kept = all_packs(r, world_views(1, RUN))

    of_all, of_kept = (Counter(pack[0][STREAM] for pack in some) for some in (every, kept))
    last = r.global_batch_size  # of the epoch, or of each stream
    lost = [of_all[stream] - of_kept[stream] for stream in range(3)]
    if method == "per_stream":
        assert all(0 <= each < last for each in lost)
    else:
        assert min(lost) >= 0
        assert sum(lost) < 3 * num_lanes * (RUN - 1) + last
    pieces = Counter((row[STREAM], row[SAMPLE], row[START]) for pack in kept for row in pack)
    assert set(pieces.values()) == {1}

    for view in world_views(2, RUN):  # each infers the lanes of the other from the number of packs
        sequence = epoch_sequence(r, view)
        while sequence.next() is not None:
            pass
        assert sequence.totals.omitted == sum(lost)
        sequence.close()


@st.composite
def uneven_recipes(draw):
    """Recipes with a tiny stream, longer packs, and lanes without samples of a stream."""
    num_lanes, run = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([2, 4, 6]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    sizes = draw(st.integers(200, 900)), draw(st.integers(100, 500)), draw(st.integers(1, 40))
    method = draw(st.sampled_from(["next_fit", "best_fit_decreasing"]))
    return recipe(
        [rng.integers(1, most, num) for most, num in zip((60, 150, 90), sizes, strict=True)],
        packing=Packing(max_seq_len=SIZE, method=method),
        mixing=Mixing(
            batching_method=draw(methods),
            epoch_end=draw(st.sampled_from(["drop", "carry"])),
            sampling_method=draw(st.sampled_from(["balanced", "fixed"])),
        ),
        order=Order(seed=1, pack_shuffle=draw(st.sampled_from([0, 64]))),
        num_lanes=num_lanes,
        lane_turn=run,
        global_batch_size=run * num_lanes * draw(st.integers(1, 3)),
        slots_per_pack=draw(st.sampled_from([None, [1, 2, 1]])),
    )


@examples(8, many=30)
@given(r=uneven_recipes(), epoch=st.integers(0, 1), data=st.data())
def test_other_worlds_and_resumes_deliver_the_same_whole_batches(r, epoch, data):
    slots_of = r.shapes.slots_per_pack
    packs = all_packs(r, world_views(1, r.lane_turn), epoch)
    served = np.array([pack[0][STREAM] for pack in packs], np.int64)
    begins = np.cumsum(slots_of[served]) - slots_of[served]
    slots = np.repeat(served, slots_of[served])

    is_whole = r.mixing.batching_method == "per_stream"
    unit = r.global_batch_size if is_whole else r.lane_turn
    assert len(slots) % r.global_batch_size == 0
    assert (slots.reshape(-1, unit) == slots[::unit, None]).all()
    if r.mixing.epoch_end == "drop":
        assert count_slots(r, epoch) // r.global_batch_size * r.global_batch_size == len(slots)

    batch_size = data.draw(st.sampled_from([r.lane_turn, 2]))
    num_batches = r.global_batch_size // batch_size
    num_devices = data.draw(st.sampled_from([n for n in range(1, 9) if num_batches % n == 0]))
    views = world_views(num_devices, batch_size)
    position = data.draw(st.integers(0, len(slots) // views[0].stride)) * views[0].stride
    rest = packs[int(np.searchsorted(begins, position)) :]
    assert all_packs(r, views, epoch, position=position) == rest


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("last")
    for number, lengths in enumerate(LENGTHS):
        write_stream_files(path / str(number), lengths.tolist(), seed=number)
    return path


def dataset(folders, method: str = "device_per_stream", epoch_end: str = "drop", **options):
    return PackedStreamingDataset(
        [Stream(local=str(folders / str(n)), name=str(n)) for n in options.pop("streams", (0, 1))],
        packing=Packing(max_seq_len=SIZE),
        mixing=Mixing(
            batching_method=method,
            epoch_end=epoch_end,
            global_batch_size=options.pop("global_batch_size", 8),
        ),
        order=Order(seed=3, num_lanes=options.pop("num_lanes", 2)),
        batch_size=options.pop("batch_size", 4),
        **options,
    )


def streams_in(batch) -> set[int]:
    return set(batch["segments"][:, 1].tolist())


@pytest.mark.parametrize("within", ["rank", "node", "batch"])
def test_ranks_with_balance_get_batches_of_one_stream(folders, within):
    for rank in range(2):
        data = dataset(
            folders,
            world=World(rank=rank, num_ranks=2, ranks_per_node=2),
            balance=Balance(within=within),
            global_batch_size=16,
        )
        assert {len(streams_in(batch)) for batch in PackedDataLoader(data)} == {1}


WAYS = [{"prefetch_threads": 2}, {"num_workers": 2}]


@pytest.mark.parametrize(("method", "options"), crossed(METHODS, WAYS))
def test_a_padded_epoch_holds_every_token_and_counts_the_packs_of_padding(folders, method, options):
    loader = PackedDataLoader(dataset(folders, method, "pad"), **options)
    batches = list(loader)
    padding = sum(int((batch["document_ids"] == 0).all(axis=1).sum()) for batch in batches)
    stats, expected = loader.stats(), simulate(dataset(folders, method, "pad"))

    assert {len(streams_in(batch)) for batch in batches} <= {0, 1}
    assert stats["tokens"] == expected["tokens"] == int(sum(own.sum() for own in LENGTHS[:2]))
    assert stats["padding_packs"] == expected["padding_packs"] == padding
    # At most a partial batch per lane and stream, and the epoch's last global batch.
    lanes = 2 if method == "device_per_stream" else 1
    assert 0 < padding < 2 * lanes * (4 if method == "device_per_stream" else 8) + 8
    assert stats["packs"] + padding == sum(len(batch["tokens"]) for batch in batches)


@pytest.mark.parametrize(("method", "options"), crossed(METHODS, WAYS[::-1]))
def test_the_packs_that_drop_omits_are_in_the_stats_and_in_the_simulation(folders, method, options):
    every = simulate(dataset(folders, method, "pad"))
    expected = simulate(dataset(folders, method))
    loader = PackedDataLoader(dataset(folders, method), **options)

    assert len(list(loader)) == len(loader) == expected["steps"]
    assert expected["omitted_packs"] == every["packs"] - expected["packs"] > 0
    assert loader.stats()["omitted_packs"] == expected["omitted_packs"]
    assert every["omitted_packs"] == 0


def test_a_stream_that_would_never_appear_is_refused_with_the_way_out(folders):
    refused = dataset(folders, streams=(0, 2), batch_size=32, global_batch_size=32)
    for start in (simulate, lambda data: next(iter(data))):
        with pytest.raises(ConfigError, match=r"stream '2' may never appear.* 'carry' or 'pad'"):
            start(refused)
    for epoch_end in ("carry", "pad"):
        options = {"streams": (0, 2), "batch_size": 32, "global_batch_size": 32}
        data = dataset(folders, "device_per_stream", epoch_end, **options)
        assert simulate(data, steps=100)["streams"]["2"]["samples"]
