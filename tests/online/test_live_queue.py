"""Shuffled packs of iterables: the same packs in windows that fit the buffers, resumed exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    Buffers,
    ConfigError,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    ResumeError,
    World,
)
from streampack.online.byte_budget import window_tokens
from streampack.runtime.resumable import engine_of
from tests.helpers.batches import same
from tests.helpers.iterables import Again, WithState, pieces, rows_of

LENGTHS = [7, 12, 30, 2, 9, 11, 170, 3, 5, 21] * 4
METHODS = ("random", "stratified", "per_stream", "device_per_stream")
PACKERS = ("best_fit_decreasing", "next_fit", "concat", "knapsack")


def dataset(
    window: int | None, kind: type = Again, method: str = "random", **kwargs: Any
) -> PackedIterableDataset:
    """Two sources of 40 and 20 samples, most in less than a pack."""
    end = kwargs.pop("epoch_end", "pad")
    kwargs.setdefault("packing", Packing(max_seq_len=32))
    return PackedIterableDataset(
        [
            IterableStream(kind(rows_of(0, LENGTHS)), proportion=2, name="a"),
            IterableStream(kind(rows_of(1, LENGTHS[:20])), proportion=1, name="b"),
        ],
        mixing=Mixing(batching_method=method, epoch_end=end),
        order=Order(seed=3, pack_shuffle=window),
        **kwargs,
    )


def packs_of(batches: list[Any]) -> list[tuple[tuple[int, ...], ...]]:
    """The segments of each pack, in order."""
    found = []
    for batch in batches:
        rows = batch["segments"].tolist()
        for pack in range(len(batch["tokens"])):
            own = tuple(tuple(row[1:]) for row in rows if row[0] == pack)
            found += [own] if own else []
    return found


@given(
    window=st.integers(1, 60),
    packer=st.sampled_from(PACKERS),
    kind=st.sampled_from([list, Again, WithState]),
    batch_size=st.integers(1, 5),
)
def test_packs_that_are_shuffled_are_those_of_a_window_in_another_order(
    window, packer, kind, batch_size
):
    options = {"kind": kind, "packing": Packing(max_seq_len=32, method=packer, buffer_samples=8)}
    plain = packs_of(list(dataset(None, batch_size=batch_size, **options)))
    batches = list(dataset(window, batch_size=batch_size, **options))
    shuffled = packs_of(batches)
    if packer in ("next_fit", "concat"):  # their packs are the same in all windows
        assert sorted(shuffled) == sorted(plain)
        moves = [abs(shuffled.index(pack) - number) for number, pack in enumerate(plain)]
        assert max(moves) <= 2 * window + 1, "on average, packs are at least half full"
    if window > 20:
        assert shuffled != plain
    wanted = {
        (stream, 0, number): row
        for stream, lengths in enumerate((LENGTHS, LENGTHS[:20]))
        for number, row in enumerate(rows_of(stream, lengths))
    }
    assert pieces(batches) == wanted


@given(
    window=st.none() | st.integers(0, 60),
    method=st.sampled_from(METHODS),
    end=st.sampled_from(["pad", "drop"]),
    packer=st.sampled_from(PACKERS),
    kind=st.sampled_from([list, Again, WithState]),
    batch_size=st.integers(1, 4),
    at=st.floats(0, 1),
    again=st.floats(0, 1),
)
def test_a_state_of_any_batch_continues_bit_for_bit(
    window, method, end, packer, kind, batch_size, at, again
):
    """Resume twice: part of the way through the epoch, then part of the way through the rest."""

    def begun() -> PackedIterableDataset:
        return dataset(
            window,
            kind,
            method,
            epoch_end=end,
            batch_size=batch_size,
            packing=Packing(max_seq_len=32, method=packer, buffer_samples=8),
        )

    wanted = list(begun())
    if end == "pad":
        assert len(pieces(wanted)) == 60
    before, left = begun(), wanted
    for share in (at, again):
        stop = int(share * (len(left) - 1))
        batches = iter(before)
        got = [next(batches) for _ in range(stop)]
        assert same(got, left[:stop])
        state, left = json.loads(json.dumps(before.state_dict())), left[stop:]
        before = begun()
        before.load_state_dict(state)
    rest = list(before)
    assert same(rest, left)


@pytest.mark.parametrize(("window", "expected"), [(2, [1, 1]), (9, [5, 4])])
def test_streams_divide_a_window_by_share_and_none_is_left_without_a_pack(window, expected):
    engine = engine_of(dataset(window, method="stratified"))
    assert window_tokens(engine.plan, engine.buffers, 0) == [
        32 * num_packs for num_packs in expected
    ]


def test_epochs_ranks_and_workers_have_orders_of_their_own():
    rows = rows_of(0, [32] * 40)

    def order_of(rank: int, epoch: int) -> list[int]:
        own = PackedIterableDataset(
            [IterableStream(rows, sharded=True)],
            packing=Packing(max_seq_len=32),
            order=Order(seed=3, pack_shuffle=40),
            world=World(rank=rank, num_ranks=2),
        )
        own.set_epoch(epoch)
        return [number for _, _, number, *_ in (pack[0] for pack in packs_of(list(own)))]

    orders = [order_of(rank, epoch) for rank in (0, 1) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4
    assert order_of(0, 0) == orders[0]


@given(
    method=st.sampled_from(METHODS),
    batch_size=st.integers(1, 3),
    room=st.integers(2, 20),
    limit=st.sampled_from(["worker_tokens", "rank_tokens"]),
)
def test_a_window_stays_inside_the_buffers(method, batch_size, room, limit):
    packing = Packing(max_seq_len=32, buffer_tokens=64)
    num_packers = 1 if method == "random" else 2
    least = num_packers * 64 + 32 * batch_size
    own = dataset(
        10**6,
        method=method,
        batch_size=batch_size,
        packing=packing,
        buffers=Buffers(**{limit: least + 32 * room}),
    )
    loader = PackedDataLoader(own, prefetch_threads=0)
    for _ in loader:
        pass
    stats = loader.stats()
    assert stats["pack_shuffle"] == room
    assert stats["buffers"]["worker_tokens"] <= least + 32 * room


def test_buffers_without_room_for_two_packs_are_refused_and_the_least_works():
    packing = Packing(max_seq_len=32, buffer_tokens=64)
    with pytest.raises(ConfigError, match="set worker_tokens to at least 160"):
        dataset(50, packing=packing, buffers=Buffers(worker_tokens=159))
    assert list(dataset(50, packing=packing, buffers=Buffers(worker_tokens=160)))


@given(
    method=st.sampled_from(METHODS),
    packer=st.sampled_from(PACKERS),
    batch_size=st.integers(1, 3),
    room=st.integers(0, 400),
    limit=st.sampled_from(["worker_tokens", "rank_tokens"]),
)
def test_windows_stay_inside_the_buffers_and_the_least_that_is_named_works(
    method, packer, batch_size, room, limit
):
    packing = Packing(max_seq_len=32, buffer_tokens=64, method=packer)
    waiting = 0 if packer == "knapsack" else 64
    least = (1 if method == "random" else 2) * (waiting + 32) + 32 * batch_size

    def loader(tokens: int) -> PackedDataLoader:
        own = dataset(
            None,
            method=method,
            batch_size=batch_size,
            packing=packing,
            buffers=Buffers(**{limit: tokens}),
        )
        return PackedDataLoader(own, prefetch_threads=0)

    with pytest.raises(ConfigError, match=f"set {limit} to at least {least}"):
        loader(least - 1)
    made = loader(least + room)
    assert len(pieces(list(made))) == 60
    assert made.stats()["buffers"]["worker_tokens"] <= least + room


@pytest.mark.parametrize(
    ("num_tokens", "size", "expected"),
    [
        (8, 16, [64, 192, 448, 960, 1984, 3008]),  # samples decide
        (8, 1024, [128, 384, 896, 1920, 3968, 6016]),  # a pack, two, four ..., 16 packs
        (8, 1 << 17, [16384]),
    ],
)
def test_windows_double_from_64_samples_to_1024_and_from_one_pack_to_16(num_tokens, size, expected):
    source = WithState([[1] * num_tokens] * 20_000)
    batches = PackedIterableDataset([IterableStream(source)], packing=Packing(max_seq_len=size))
    drawn = []
    for _ in batches:
        if source.num_given not in drawn:
            drawn.append(source.num_given)
        if len(drawn) == len(expected):
            break
    assert drawn == expected


def test_a_window_ends_at_a_million_tokens_and_the_rest_of_a_sample_is_for_the_next():
    source = WithState([[1] * 4_000_000, *[[2] * 2048] * 3000])
    made = PackedIterableDataset([IterableStream(source)], packing=Packing(max_seq_len=2048))
    loader = PackedDataLoader(made, prefetch_threads=0)
    for _ in loader:
        pass
    assert loader.stats()["buffers"]["worker_tokens"] <= (1 << 20) + 65_536 + 2048


def test_another_window_is_refused_at_a_resume():
    own = dataset(8)
    next(iter(own))
    state = own.state_dict()
    for other, value in ((None, None), (9, 9)):
        with pytest.raises(ResumeError, match=f"pack_shuffle=8, but .* pack_shuffle={value}"):
            dataset(other).load_state_dict(state)
    buffers = Buffers(worker_tokens=Packing(max_seq_len=32).buffer_limit + 32 + 3 * 32)
    with pytest.raises(ResumeError, match="pack_shuffle=8, but this dataset has pack_shuffle=3"):
        dataset(8, buffers=buffers).load_state_dict(state)
    plain = dataset(0)
    next(iter(plain))
    with pytest.raises(ResumeError, match=r"pack_shuffle=None, but .* pack_shuffle=8"):
        dataset(8).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("packer", [*PACKERS, "two_tiers"])
def test_a_state_of_any_window_continues_bit_for_bit(packer):
    rows = [[1] * (1 + number * 7919 % 31) for number in range(2000)]
    short_seq_len = 8 if packer == "two_tiers" else None
    packing = Packing(max_seq_len=32, method=packer, short_seq_len=short_seq_len)

    def begun() -> PackedIterableDataset:
        return PackedIterableDataset([IterableStream(rows)], packing=packing, batch_size=16)

    wanted, made = list(begun()), begun()
    assert len(pieces(wanted)) == 2000
    for first in range(0, len(wanted) - 5, 5):
        batches = iter(made)
        assert same([next(batches) for _ in range(5)], wanted[first : first + 5])
        state, made = json.loads(json.dumps(made.state_dict())), begun()
        made.load_state_dict(state)


@pytest.mark.parametrize(("num_tokens", "expected"), [(32, 0), (20, 1)])
def test_stats_show_the_longest_wait(num_tokens, expected):
    """A pack that cannot be filled waits for one window, and leaves with it."""

    def loader() -> PackedDataLoader:
        source = [[1] * 32, [1] * num_tokens] * 500
        own = PackedIterableDataset([IterableStream(source)], packing=Packing(max_seq_len=32))
        return PackedDataLoader(own, prefetch_threads=0)

    made, again = loader(), loader()
    assert made.stats()["longest_wait"] == 0
    assert len(list(zip(range(900), made, strict=False))) == 900
    assert made.stats()["longest_wait"] == expected
    again.load_state_dict(made.state_dict())
    assert again.stats()["longest_wait"] == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 1024), (9, 9), (4096, 4096)])
def test_1024_samples_wait_unless_asked_for_others(asked, expected):
    packing = Packing(max_seq_len=32, buffer_samples=asked)
    own = dataset(None, packing=packing)
    state = own.state_dict()
    assert state["fingerprint"]["buffer_samples"] == expected
    assert packing.sample_limit == (asked or 4096), "of planned streams"
