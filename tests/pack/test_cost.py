"""Packs of equal cost: both bounds are kept, and sizes are tokens or shares of the cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.balance import AttentionCost
from streampack.config import PackCost, Packing
from streampack.pack import make_packer
from streampack.pack.cost import check_max_cost, cost_of
from streampack.types import LENGTH, SAMPLE, Packs
from tests.helpers.lengths import synthetic_lengths
from tests.helpers.oracles import rows_of


@st.composite
def packings(draw) -> Packing:
    size = 8 * draw(st.integers(2, 500))
    hidden = draw(st.sampled_from([1, 8, 64, 4096]))
    window = draw(st.sampled_from([None, 1, 100]))
    longest = float(AttentionCost(hidden_size=hidden, window=window)(np.array([size]))[0])
    return Packing(
        max_seq_len=size,
        cost=PackCost(
            int(np.ceil(longest * draw(st.floats(1, 2)))),
            capacity=draw(st.sampled_from([None, size, size + 8 * (size // 32)])),
            hidden_size=hidden,
            window=window,
        ),
        pad_to_multiple=draw(st.sampled_from([None, 8])),
        buffer_samples=draw(st.sampled_from([3, 4096])),
    )


@given(packing=packings(), data=st.data())
def test_every_pack_keeps_both_bounds_and_every_segment_is_packed_once(packing, data):
    check_max_cost(packing)
    lengths = st.lists(st.integers(1, packing.max_seq_len), min_size=1, max_size=40)
    rows = rows_of(data.draw(lengths))
    packer = make_packer(packing)

    half = len(rows) // 2
    packs = Packs.join([packer.add(rows[:half]), packer.add(rows[half:]), packer.flush()])

    assert sorted(packs.segments[:, SAMPLE].tolist()) == list(range(len(rows)))
    assert np.array_equal(
        packs.segments[np.argsort(packs.segments[:, SAMPLE]), LENGTH], rows[:, LENGTH]
    )
    multiple = packing.pad_to_multiple or 1
    for pack in range(len(packs)):
        taken = -(-packs[pack][:, LENGTH] // multiple) * multiple
        assert taken.sum() <= packing.row_tokens <= 1.5 * packing.max_seq_len
        # Costs are rounded to 1 / 1,024 of a token each.
        assert cost_of(packing.cost)(taken).sum() <= packing.cost.max_cost + len(taken) / 1024


def test_short_samples_fill_the_capacity_and_long_ones_the_cost():
    packing = Packing(max_seq_len=1000, cost=PackCost(2000, hidden_size=100))
    lengths = np.concatenate([np.full(30_000, 10), np.full(60, 1000), np.full(100, 700)])
    packs = make_packer(packing).add(rows_of(np.random.default_rng(0).permutation(lengths)))

    tokens = [int(packs[pack][:, LENGTH].sum()) for pack in range(len(packs))]
    costs = [
        float(cost_of(packing.cost)(packs[pack][:, LENGTH]).sum()) for pack in range(len(packs))
    ]
    fullest = np.maximum(np.array(tokens) / 1500, np.array(costs) / 2000)

    assert min(tokens) == 1120
    assert max(tokens) == 1500
    assert np.median(fullest) > 0.99


def test_packs_of_web_cost_nearly_the_same_and_hold_more_tokens():
    lengths = np.minimum(synthetic_lengths("web", 200_000), 32_768)
    packing = Packing(max_seq_len=32_768, cost=PackCost(54_614))
    check_max_cost(packing)

    packs = make_packer(packing).add(rows_of(lengths))

    costs = np.array([cost_of(packing.cost)(packs[p][:, LENGTH]).sum() for p in range(len(packs))])
    assert costs.max() <= 54_614
    assert costs.max() / costs.mean() < 1.1
    assert packs.segments[:, LENGTH].sum() / len(packs) > 1.3 * 32_768


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    window=st.sampled_from([None, 1, 7, 60, 100]),
    hidden=st.sampled_from([1, 8, 4096]),
)
def test_a_sample_costs_its_tokens_and_the_pairs_that_attend(lengths, window, hidden):
    packing = Packing(max_seq_len=64, cost=PackCost(10**6, hidden_size=hidden, window=window))
    costs = cost_of(packing.cost)(np.array(lengths))
    for length, cost in zip(lengths, costs.tolist(), strict=True):
        near = [min(token + 1, window or length) for token in range(length)]
        # A pair of causal attention is half of one in the cost of whole attention, n**2.
        pairs = 2 * sum(near) - min(length, window or length)
        assert cost == pytest.approx(length + pairs / (12 * hidden))
