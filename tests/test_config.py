"""Each config refuses impossible values when it is constructed, and suggests what would work."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import Bucketing, Buffers, ConfigError, Mixing, Order, Packing
from streampack._checks import parse_count

CONFIGS = [Packing(max_seq_len=2048), Bucketing(max_tokens=64), Mixing(), Order(), Buffers()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_config_is_frozen_comparable_and_rebuilt_from_its_fields(config):
    again = type(config)(**dataclasses.asdict(config))

    assert again == config
    assert hash(again) == hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)


@pytest.mark.parametrize(
    ("max_seq_len", "limit"), [(512, 65_536), (8192, 65_536), (8193, 65_544), (131_072, 1_048_576)]
)
def test_a_packer_holds_eight_packs_and_no_less_than_65536_tokens(max_seq_len, limit):
    assert Packing(max_seq_len=max_seq_len).buffer_limit == limit


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("10k", 10_000), ("1.5M", 1_500_000), (" 2b ", 2 * 10**9), ("3t", 3 * 10**12)],
)
def test_counts_are_read_as_mosaicml_streaming_reads_them(text, count):
    assert parse_count("epoch_size", text) == count
    assert Mixing(epoch_size=text).epoch_size == count


@given(thousandths=st.integers(1, 10**12))
def test_a_count_in_thousands_is_exact(thousandths):
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}k"
    assert parse_count("epoch_size", text) == thousandths


COUNTS = [
    *((Packing, name) for name in ("max_seq_len", "buffer_tokens", "buffer_samples")),
    *((Packing, name) for name in ("bos_id", "eos_id", "padding_id")),
    *((Bucketing, name) for name in ("max_tokens", "buffer_samples", "max_samples")),
    *((Mixing, name) for name in ("epoch_size", "global_batch_size")),
    *((Order, name) for name in ("shuffle_block_size", "num_lanes")),
    *((Buffers, name) for name in ("worker_tokens", "worker_bytes", "rank_tokens")),
]


def with_count(config: type, name: str, value: object) -> object:
    """A config with this count, and what else it must have."""
    required = {Packing: {"max_seq_len": 8}, Bucketing: {"max_tokens": 8}}
    return config(**{**required.get(config, {}), name: value})


@pytest.mark.parametrize(("config", "name"), COUNTS[::3])
@pytest.mark.parametrize(
    "number",
    [
        1e4,
        np.int64(10_000),
        np.uint16(10_000),
        np.float32(10_000),
        np.array(10_000),
        Fraction(10_000),
    ],
    ids=lambda number: type(number).__name__,
)
def test_a_whole_number_of_any_kind_is_kept_as_an_int(config, name, number):
    kept = getattr(with_count(config, name, number), name)

    assert type(kept) is int
    assert kept == 10_000


@pytest.mark.parametrize("seed", [0, np.int32(17), 2**80])
def test_a_seed_is_kept_as_an_int(seed):
    assert type(Order(seed=seed).seed) is int
    assert Order(seed=seed).seed == seed


@pytest.mark.parametrize("most", [0, -1, "4", True, float("nan"), {"math": 0}, {"math": None}])
def test_a_limit_of_repeats_is_a_number_above_0_or_such_numbers_by_name(most):
    with pytest.raises(ConfigError, match=r"max_repeats=.* is not a number above 0"):
        Mixing(max_repeats=most)
    assert Mixing(max_repeats={"math": 2}).max_repeats_of("web") is None
