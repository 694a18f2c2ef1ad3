"""Shuffled passes: every sample once, random access, and few shards in flight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.order.lanes import assign_to_lanes
from streampack.order.shuffle import Lengths, Passes
from streampack.rng import MAX_SMALL
from streampack.types import PASS, SAMPLE, TOKENS

shard_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def halves(lengths: np.ndarray) -> np.ndarray:
    """Count a sample of over 50 tokens as nothing, as overflow="drop" does."""
    return np.where(lengths > 50, 0, lengths)


def shard_tokens(weights: np.ndarray, first_sample: np.ndarray) -> np.ndarray:
    return np.diff(np.append(0, np.cumsum(weights))[first_sample])


def make_passes(
    shard_sizes: list[int],
    block_size: int = 8,
    seed: int = 5,
    asked: list[int] | None = None,
    weigh: Callable | None = None,
    *,
    has_totals: bool = False,
) -> tuple[Passes, np.ndarray]:
    """Passes over a single lane with all samples, and the tokens of every sample."""
    samples = np.array(shard_sizes)
    first_sample = np.append(0, np.cumsum(samples))
    lengths = 1 + np.arange(first_sample[-1]) * 37 % 101

    def lengths_of(shard: int) -> np.ndarray:
        if asked is not None:
            asked.append(shard)
        return lengths[first_sample[shard] : first_sample[shard + 1]]

    extents = assign_to_lanes(samples, samples * 10, 1, seed, (0,))[0]
    passes = Passes(
        extents,
        Lengths(
            first_sample=first_sample,
            of_shard=lengths_of,
            weigh=weigh,
            shard_tokens=shard_tokens(lengths if weigh is None else weigh(lengths), first_sample)
            if has_totals
            else None,
        ),
        number=0,
        block_size=block_size,
        seed=seed,
        seed_path=(0, 0),
    )
    return passes, lengths


@given(shard_sizes=shard_sizes, block_size=st.integers(1, 30), seed=st.integers(-1, 50))
def test_every_pass_takes_every_sample_once_with_its_length(shard_sizes, block_size, seed):
    passes, lengths = make_passes(shard_sizes, block_size, seed)
    num = sum(shard_sizes)

    taken = passes.take(0, 3 * num)
    for number in range(3):
        own = slice(number * num, (number + 1) * num)
        assert (taken[own, PASS] == number).all()
        assert sorted(taken[own, SAMPLE].tolist()) == list(range(num))
    assert (taken[:, TOKENS] == lengths[taken[:, SAMPLE]]).all()


@given(
    shard_sizes=shard_sizes,
    block_size=st.integers(1, 30),
    parts=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 25)), max_size=12),
)
def test_any_part_in_any_order_is_that_of_the_whole(shard_sizes, block_size, parts):
    whole = make_passes(shard_sizes, block_size)[0].take(0, 175)
    passes = make_passes(shard_sizes, block_size)[0]

    for at, count in parts:
        assert passes.take(at, count).tolist() == whole[at : at + count].tolist()


@pytest.mark.parametrize(
    ("sizes", "block_size"), [([2, 4], 2), ([30, 50], 40), ([2 * MAX_SMALL] * 2, MAX_SMALL + 9)]
)
@pytest.mark.parametrize("step", [1, 3, 6, 7, MAX_SMALL])
def test_elements_some_steps_apart_are_those_that_are_taken_alone(sizes, block_size, step):
    """Also where each is in another pass, and in the same block of it."""
    passes, _ = make_passes(sizes, block_size)
    alone = [passes.take(place, 1)[0].tolist() for place in range(5, 5 + 20 * step, step)]
    rows = np.empty((20, 4), np.int64)

    passes.put(5, rows, np.arange(20), step)
    assert rows.tolist() == alone


@given(shard_sizes=shard_sizes, block_size=st.integers(1, 30), seed=st.integers(0, 50))
def test_no_more_shards_are_in_flight_than_a_block_of_samples_can_touch(
    shard_sizes, block_size, seed
):
    passes, _ = make_passes(shard_sizes, block_size, seed)
    num = sum(shard_sizes)
    shard_of = np.repeat(np.arange(len(shard_sizes)), shard_sizes)
    order = shard_of[passes.take(0, num)[:, SAMPLE]]
    first = {shard: int(np.argmax(order == shard)) for shard in range(len(shard_sizes))}
    last = {s: num - 1 - int(np.argmax(order[::-1] == s)) for s in range(len(shard_sizes))}

    # Shards are read by blocks of `block_size`: the smallest ones could fill a block by themselves.
    most, room = 2, block_size - 2
    for size in sorted(shard_sizes):
        if room > 0:
            most, room = most + 1, room - size
    for at in range(num):
        assert sum(first[s] <= at <= last[s] for s in first) <= min(most, len(shard_sizes))


def test_blocks_ask_for_the_lengths_of_their_own_shards_only():
    asked: list[int] = []
    passes, _ = make_passes([10] * 50, block_size=20, asked=asked)
    assert asked == []

    passes.take(0, 20)
    assert len(set(asked)) == 2
    passes.take(20, 1)
    assert len(set(asked)) == 4


def test_without_shuffle_it_is_stored_order_in_every_pass():
    passes, _ = make_passes([3, 4, 2], block_size=4, seed=-1)

    assert passes.take(0, 18)[:, SAMPLE].tolist() == [*range(9), *range(9)]


def test_passes_seeds_and_places_differ_in_their_order():
    num = 60
    passes, _ = make_passes([10] * 6, block_size=20)
    other, _ = make_passes([10] * 6, block_size=20, seed=6)
    taken = passes.take(0, 2 * num)[:, SAMPLE]

    assert taken[:num].tolist() != taken[num:].tolist()
    assert taken.tolist() != other.take(0, 2 * num)[:, SAMPLE].tolist()
    assert taken[:num].tolist() != list(range(num))


@pytest.mark.parametrize(("size", "block_size"), [(1, 1), (50, 50), (200, 200)])
def test_seed_0_shuffles_shards_in_every_pass_as_any_other(size, block_size):
    taken = make_passes([size] * 20, block_size, seed=0)[0].take(0, 40 * size)
    shards = (taken[::size, SAMPLE] // size).reshape(2, 20).tolist()

    assert shards[0] != shards[1]
    assert sorted(shards[0]) == sorted(shards[1]) == list(range(20))


def test_a_shuffle_mixes_the_shards_of_a_block_and_moves_whole_shards():
    passes, _ = make_passes([100] * 40, block_size=1000)
    order = passes.take(0, 4000)[:, SAMPLE] // 100

    # 10 shards a block: neighbours are of one shard in about a tenth of the places.
    assert (order[1:] == order[:-1]).mean() < 0.2
    assert len(set(order[:1000])) == 10
    assert sorted(set(order[:1000])) != list(range(10))


@given(
    shard_sizes=shard_sizes,
    block_size=st.integers(1, 30),
    tokens=st.integers(-5, 6000),
    weigh=st.sampled_from([None, halves]),
    has_totals=st.booleans(),
)
def test_find_tokens_finds_the_first_element_that_starts_there(
    shard_sizes, block_size, tokens, weigh, has_totals
):
    passes, lengths = make_passes(shard_sizes, block_size, weigh=weigh, has_totals=has_totals)
    weights = lengths if weigh is None else weigh(lengths)
    if not weights.sum():
        return
    num = sum(shard_sizes)
    many = num * (2 + tokens // int(weights.sum()))
    of_each = weights[passes.take(0, many)[:, SAMPLE]]
    starts = np.cumsum(of_each) - of_each

    cursor, before = passes.find_tokens(tokens)
    assert cursor == np.searchsorted(starts, tokens)
    assert before == starts[cursor]
    # As well where it knows by then what a pass counts.
    passes.tokens_in_pass()
    assert passes.find_tokens(tokens) == (cursor, before)


def test_where_no_sample_counts_no_element_starts_later():
    passes, _ = make_passes([3, 4], weigh=np.zeros_like)

    assert passes.find_tokens(5) == (0, 0)


@pytest.mark.parametrize("passes", [0, 3])
def test_where_tokens_are_is_found_by_the_shards_totals_and_the_lengths_of_a_block(passes):
    asked: list[int] = []
    order, lengths = make_passes([9] * 100, 20, asked=asked, has_totals=True)
    order.find_tokens(int(lengths.sum()) * passes + int(lengths.sum()) // 2)
    assert len(set(asked)) <= 5  # a block's, and one that two blocks share


def test_without_totals_no_more_lengths_are_asked_for_than_lie_before():
    asked: list[int] = []
    order, lengths = make_passes([9] * 100, 20, asked=asked)
    order.find_tokens(int(lengths.sum()) // 10)
    assert len(set(asked)) <= 14


@given(
    shard_sizes=shard_sizes,
    block_size=st.integers(1, 30),
    first=st.integers(0, 150),
    count=st.integers(0, 150),
    weigh=st.sampled_from([None, halves]),
    has_totals=st.booleans(),
)
def test_tokens_between_two_elements_are_summed_right(
    shard_sizes, block_size, first, count, weigh, has_totals
):
    passes, lengths = make_passes(shard_sizes, block_size, weigh=weigh, has_totals=has_totals)
    weights = lengths if weigh is None else weigh(lengths)

    assert passes.tokens_between(first, first + count) == int(
        weights[passes.take(first, count)[:, SAMPLE]].sum()
    )
    assert passes.tokens_in_pass() == int(weights.sum())
