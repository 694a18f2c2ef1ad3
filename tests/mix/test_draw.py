"""Draws are exact over an epoch by samples, and always close to their share by tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.mix.apportion import apportion, scaled_shares
from streampack.mix.draw import (
    CHUNK,
    TOKEN_SCALE,
    draw_by_tokens,
    draw_chunk,
    first_deficits,
    first_wait,
)

quotas = st.lists(st.integers(0, 9000), min_size=1, max_size=6)
lengths = st.one_of(st.integers(1, 20), st.integers(1, 3000))


def draw_by_samples(quotas: list[int], chunk: int, seed: int, place: tuple[int, ...]) -> np.ndarray:
    """The stream of each draw of a chunk, shape (up to CHUNK,); empty after the last."""
    counts, places = draw_chunk(quotas, chunk, seed, place)
    draws = np.empty(counts.sum(), np.int64)
    draws[places] = np.repeat(np.arange(len(counts)), counts)
    return draws


def chunks(quotas: list[int], seed: int = 3) -> list[np.ndarray]:
    drawn = []
    while len(chunk := draw_by_samples(quotas, len(drawn), seed, (0, 0))):
        drawn.append(chunk)
    return drawn


@given(quotas=quotas)
def test_every_chunk_holds_the_cumulative_apportionment_of_the_shares(quotas):
    counts = np.zeros(len(quotas), np.int64)
    total = sum(quotas)
    for number, chunk in enumerate(chunks(quotas), start=1):
        counts += np.bincount(chunk, minlength=len(quotas))
        drawn = min(number * CHUNK, total)
        assert counts.tolist() == apportion(drawn, quotas)
        assert np.abs(counts - drawn * np.array(quotas) / total).max() < len(quotas)


def test_the_order_inside_a_chunk_depends_on_seed_epoch_and_lane_alone():
    def drawn(seed: int, *place: int) -> list[int]:
        return draw_by_samples([50, 50], 0, seed, place).tolist()

    assert drawn(1, 0, 0) == drawn(1, 0, 0)
    assert len({tuple(drawn(*key)) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]}) == 4


def draw_tokens(weights: list[int], lengths: list[list[int]], num_draws: int) -> list[int]:
    """Draw from streams that end after their lengths."""
    ends = np.cumsum([len(own) for own in lengths])
    out = np.empty(num_draws, np.int64)
    made = draw_by_tokens(
        scaled_shares(weights, TOKEN_SCALE) * [bool(own) for own in lengths],
        np.zeros(len(weights), np.int64),
        np.array([length for own in lengths for length in own], np.int64),
        ends,
        ends - [len(own) for own in lengths],
        np.ones(len(weights), np.int64),
        out,
    )
    return out[:made].tolist()


def test_by_tokens_a_large_share_waits_for_its_turns_among_many_small_ones():
    drawn = draw_tokens([10] + [1] * 10, [[1] * 100] + [[1] * 10] * 10, 200)

    # The stream has half of everything, and never runs ahead by more than one of its samples.
    assert np.abs(np.cumsum(np.array(drawn) == 0) - np.arange(1, 201) / 2).max() <= 1


@given(
    weights=st.lists(st.integers(1, 100), min_size=3, max_size=5),
    lengths=st.lists(st.lists(lengths, min_size=1, max_size=60), min_size=5, max_size=5),
)
def test_by_tokens_streams_that_are_left_share_what_follows_as_they_shared_before(weights, lengths):
    lengths = lengths[: len(weights)]
    nexts, got = [0] * len(weights), np.zeros(len(weights))

    for stream in draw_tokens(weights, lengths, 400):
        live = [n < len(own) for n, own in zip(nexts, lengths, strict=True)]
        shares = np.array(weights) * live / np.dot(weights, live)
        longest = max(max(own) for own, is_live in zip(lengths, live, strict=True) if is_live)
        got[stream] += lengths[stream][nexts[stream]]
        nexts[stream] += 1
        assert np.abs(got - got.sum() * shares).max() <= longest + 1e-3
        if nexts[stream] == len(lengths[stream]):
            got[:] = 0  # the count starts over


@given(
    weights=st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(any),
    lengths=st.lists(st.lists(lengths, max_size=30), min_size=5, max_size=5),
)
def test_by_tokens_everything_is_drawn_in_the_end(weights, lengths):
    lengths = lengths[: len(weights)]
    drawn = draw_tokens(weights, lengths, 400)

    counts = np.bincount(drawn, minlength=len(weights))
    assert counts.tolist() == [len(own) for own in lengths]


def test_by_tokens_it_waits_where_a_stream_s_next_length_is_not_known_yet():
    out = np.empty(10, np.int64)
    nexts = np.array([0, 2])
    made = draw_by_tokens(
        scaled_shares([1, 1], TOKEN_SCALE),
        np.zeros(2, np.int64),
        np.array([5, 5, 1, 1, 1, 1, 1, 1], np.int64),
        np.array([2, 8]),
        nexts,
        np.zeros(2, np.int64),
        out,
    )

    assert nexts[1] == 8
    assert made == nexts[0] + nexts[1] - 2 < len(out)


@given(
    lengths=st.lists(st.lists(lengths, min_size=20, max_size=40), min_size=3, max_size=3),
    cut=st.integers(1, 30),
)
def test_by_tokens_stopping_and_going_on_with_the_same_deficits_changes_nothing(lengths, cut):
    shares = scaled_shares([5, 3, 2], TOKEN_SCALE)
    flat = np.array([length for own in lengths for length in own], np.int64)
    ends = np.cumsum([len(own) for own in lengths])

    def run(*sizes: int) -> list[int]:
        deficits, nexts = np.zeros(3, np.int64), ends - [len(own) for own in lengths]
        drawn: list[int] = []
        for size in sizes:
            out = np.empty(size, np.int64)
            live = shares * (nexts < ends)
            made = draw_by_tokens(live, deficits, flat, ends, nexts, np.ones(3, np.int64), out)
            drawn += out[:made].tolist()
        return drawn

    assert run(cut, 60 - cut) == run(60)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_first_waits_are_parts_of_lengths_that_are_drawn_by_tokens_and_spread_over_lanes(share):
    lengths = np.random.default_rng(0).lognormal(6, 1, 250).astype(np.int64)
    means, at_once = [], []
    for seed in range(20):
        waits = [first_wait(lengths, share, lane, seed, (0, "web")) for lane in range(64)]
        assert all(0 <= wait <= lengths.max() for wait in waits)
        at_once.append(waits.count(0) / len(waits))
        means.append(np.mean(waits))
    expected = (lengths**2).sum() / lengths.sum() / 2  # half of a length drawn by tokens

    assert abs(np.mean(means) / expected - 1) < 0.03
    assert abs(np.mean(at_once) - share / 2) < 0.01  # where a lane begins inside a sample
    if share < 0.1:
        assert np.std(means) / expected < 0.15  # 0.19 if each lane were drawn independently
    places = [(3, 0, "web"), (3, 1, "web"), (4, 0, "web"), (3, 0, "code")]
    assert len({first_wait(lengths, share, 0, seed, path) for seed, *path in places}) == 4
    assert first_wait(lengths[:0], share, 0, 3, (0, "web")) == 0


@given(
    weights=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    waits=st.lists(st.integers(0, 2**31), min_size=5, max_size=5),
)
def test_first_deficits_sum_to_nothing_and_none_is_ahead_by_more_than_its_wait(weights, waits):
    deficits = first_deficits(
        scaled_shares(weights, TOKEN_SCALE), waits := waits[: len(weights)]
    ).tolist()

    assert sum(deficits) == 0
    assert all(own >= -wait * TOKEN_SCALE for own, wait in zip(deficits, waits, strict=True))
