"""What an epoch takes from each stream, by samples and by tokens."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import streaming
from hypothesis import example, given
from hypothesis import strategies as st

from streampack.mix.weights import Weight, resolve_weights

SEED_SIZES = [100, 200]

sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=8)
proportions = st.one_of(
    st.integers(0, 1000), st.floats(0, 1e6, allow_subnormal=False).map(lambda x: round(x, 6))
)


def resolve(asked: list[dict], num_samples: list[int], **kwargs) -> list[int]:
    weights = [Weight(name=f"s{number}", **weight) for number, weight in enumerate(asked)]
    # tokens: seven per sample, so that confusing the two units would show.
    quotas = resolve_weights(weights, [(num, 7 * num) for num in num_samples], **kwargs)
    return [quota.amount for quota in quotas]


@pytest.mark.parametrize(
    ("asked", "epoch_size", "expected"),
    [
        ([{"proportion": 0.25}, {"proportion": 0.75}], None, [75, 225]),
        ([{"proportion": 2}, {"proportion": 6}], None, [75, 225]),
        ([{"proportion": 0.25}, {"proportion": 0.75}], 400, [100, 300]),
        ([{}, {}], None, [100, 200]),
        ([{}, {}], 150, [50, 100]),
        ([{"repeat": 3}, {}], None, [300, 200]),
        ([{}, {"repeat": 0.25}], None, [100, 50]),
        ([{"choose": 250}, {}], None, [250, 200]),
        ([{"repeat": 0.29}, {"choose": 0}], None, [29, 0]),
        ([{"repeat": 0}, {}], None, [0, 200]),
    ],
)
def test_the_seed_s_numbers_come_out(asked, epoch_size, expected):
    assert resolve(asked, SEED_SIZES, epoch_size=epoch_size) == expected


@given(weights=st.lists(proportions, min_size=1, max_size=8), total=st.integers(1, 10**9))
def test_proportions_give_an_epoch_of_exactly_its_size_each_within_one_of_its_share(weights, total):
    if not any(weights):
        return
    amounts = resolve([{"proportion": w} for w in weights], [5] * len(weights), epoch_size=total)

    exact = [Fraction(repr(w)) for w in weights]
    assert sum(amounts) == total
    for amount, share in zip(amounts, exact, strict=True):
        assert abs(amount - total * share / sum(exact)) < 1


@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    total=st.integers(1, 10**6),
)
def test_the_shortfall_goes_to_the_largest_remainders_then_the_lower_index(weights, total):
    amounts = resolve([{"proportion": w} for w in weights], [5] * len(weights), epoch_size=total)

    floors = [total * w // sum(weights) for w in weights]
    remainders = [total * w % sum(weights) for w in weights]
    by_rank = sorted(range(len(weights)), key=lambda i: (-remainders[i], i))
    for index in by_rank[: total - sum(floors)]:
        floors[index] += 1
    assert amounts == floors


@given(percent=st.integers(0, 400), num_samples=st.integers(1, 10**7))
def test_repeat_is_read_as_it_is_written(percent, num_samples):
    (amount, _) = resolve([{"repeat": percent / 100}, {"choose": 1}], [num_samples, 1])

    assert amount == percent * num_samples // 100


def test_weight_unit_tokens_counts_all_in_tokens_but_repeat():
    pair = [Weight(name="a", proportion=1), Weight(name="b", proportion=3)]
    held = [(100, 700), (200, 1400)]

    by_tokens = resolve_weights(pair, held, unit="tokens")
    assert [(q.amount, q.unit) for q in by_tokens] == [(525, "tokens"), (1575, "tokens")]
    sized = resolve_weights(pair, held, unit="tokens", epoch_size=800)
    assert [(q.amount, q.unit) for q in sized] == [(200, "tokens"), (600, "tokens")]
    absolute = [Weight(name="a", choose=50), Weight(name="b", repeat=0.5)]
    mixed = resolve_weights(absolute, held, unit="tokens")
    assert [(q.amount, q.unit) for q in mixed] == [(50, "tokens"), (100, "samples")]
    plain = resolve_weights([Weight(name="a")] * 2, held, unit="tokens", epoch_size=300)
    assert [(q.amount, q.unit) for q in plain] == [(100, "tokens"), (200, "tokens")]


def mosaic_amounts(asked: list[dict], num_samples: list[int], epoch_size: int | None, seed: int):
    streams = [streaming.Stream(local=f"nowhere/{i}", **weight) for i, weight in enumerate(asked)]
    total = streaming.Stream.apply_weights(
        streams, np.array(num_samples, np.int64), epoch_size, seed=seed
    )
    amounts = [int(stream.choose) for stream in streams]
    assert sum(amounts) == total
    return amounts


PROPORTIONS = st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=8, max_size=8).map(
    lambda weights: [{"proportion": each} for each in [weights[0] or 0.7, *weights[1:]]]
)
ABSOLUTE = st.lists(
    st.one_of(
        st.just({}),
        st.floats(1e-3, 50).map(lambda x: {"repeat": x}),
        st.integers(1, 10**7).map(lambda x: {"choose": x}),
    ),
    min_size=8,
    max_size=8,
)


@example(num_samples=[1], asked=[{"repeat": 0.5}], epoch_size=None, seed=1)
@given(
    num_samples=sizes,
    asked=PROPORTIONS | ABSOLUTE | st.just([{}] * 8),
    epoch_size=st.none() | st.integers(1, 10**8),
    seed=st.integers(0, 2**31),
)
def test_mosaicml_arithmetic_is_theirs_bit_for_bit(num_samples, asked, epoch_size, seed):
    asked = asked[: len(num_samples)]
    if any({"repeat", "choose"} & set(each) for each in asked):
        epoch_size = None
    with np.errstate(invalid="ignore"):  # their code divides by the number of chosen samples
        theirs = mosaic_amounts(asked, num_samples, epoch_size, seed)
    if not any(theirs):
        return  # for us this is an error

    ours = resolve(asked, num_samples, epoch_size=epoch_size, arithmetic="mosaicml", seed=seed)
    assert ours == theirs


KINDS = [
    float,
    np.float64,
    np.float32,
    Decimal,
    Fraction,
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_any_kind_of_number_is_read_as_it_is_written(kind):
    assert resolve([{"repeat": kind("0.29")}, {}], [100, 1]) == [29, 1]
    thirds = [{"proportion": kind("0.1")}, {"proportion": kind("0.2")}]
    assert resolve(thirds, [1, 1], epoch_size=3 * 10**12) == [10**12, 2 * 10**12]


def test_relative_weights_of_thousands_of_streams_are_resolved_at_once():
    weights = [Weight(name=f"s{i}", proportion=1 / (i + 1)) for i in range(2000)]
    begin = time.process_time()
    quotas = resolve_weights(weights, [(1000, 100_000)] * 2000, epoch_size=10**6)
    assert sum(quota.amount for quota in quotas) == 10**6
    assert time.process_time() - begin < 3
