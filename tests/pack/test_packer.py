"""Laws that every packer keeps: 1 (nothing lost), 2 (packs fit, one cut), 3 (bounds), 4, 5."""

from __future__ import annotations

import json
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.config.packing import Method
from streampack.pack import make_packer
from streampack.pack.buffered import BufferedPacker, rooms
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM, TOTAL, Packs
from tests.helpers import oracles
from tests.helpers.examples import examples
from tests.helpers.oracles import rows_of

METHODS = get_args(Method)
WINDOWED = ("best_fit_decreasing", "knapsack", "two_tiers")  # their calls are windows
STEADY = tuple(method for method in METHODS if method not in WINDOWED)
ORACLES = {method: getattr(oracles, method) for method in STEADY}
SIZES = [1, 2, 3, 7, 8, 16, 63, 64, 65, 128, 500, 1000, 3000, 8192, 20_000]


def packing_of(method: str, size: int, **options: Any) -> Packing:
    """A packing of any method; two_tiers needs to know what is short."""
    if method == "two_tiers":
        options = {"short_seq_len": max(1, size // 4), **options}
    return Packing(max_seq_len=size, method=method, **options)


@st.composite
def cases(draw, methods: tuple[str, ...] = METHODS) -> tuple[Packing, np.ndarray]:
    """A packing and segments that it may meet: tiny, full, just over a half, all alike, pieces."""
    method = draw(st.sampled_from(methods))
    multiple = draw(st.sampled_from([None, None, 2, 8]))
    size = draw(st.sampled_from(SIZES))
    if multiple or method == "two_tiers":
        size = 32 * max(1, size // 32)
    one_length = st.one_of(
        st.integers(1, size),
        st.integers(1, max(1, size // 8)),
        st.sampled_from([1, size, size // 2 + 1, max(1, size - 1), max(1, size // 3)]),
        st.integers(1, max(1, size // 64)).map(lambda count: min(64 * count, size)),
    )
    lengths = draw(st.lists(one_length, max_size=60))
    options = {}
    if method not in ("concat", "two_tiers"):
        options["max_samples_per_pack"] = draw(st.sampled_from([None, 1, 2, 3, 7]))
    packing = packing_of(
        method,
        size,
        buffer_tokens=draw(st.sampled_from([size, size + 1, 2 * size, 8 * size, None])),
        buffer_samples=draw(st.sampled_from([1, 2, 3, 10, 4096])),
        pad_to_multiple=multiple,
        **options,
    )
    rows = rows_of(lengths)
    # Some are pieces of longer samples, and a cut must keep counting from their start.
    starts = draw(st.lists(st.sampled_from([0, size]), min_size=len(rows), max_size=len(rows)))
    rows[:, START] = starts
    rows[:, TOTAL] += rows[:, START]
    return packing, rows


def pack_all(packer: BufferedPacker, rows: np.ndarray) -> Packs:
    return Packs.join([packer.add(rows), packer.flush()])


def as_lists(packs: Packs) -> list[list[list[int]]]:
    return [packs[pack].tolist() for pack in range(len(packs))]


def rules_of(packing: Packing) -> oracles.Rules:
    return oracles.Rules(
        max_seq_len=packing.max_seq_len,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.buffer_samples,
        max_samples=packing.max_samples_per_pack,
        multiple=packing.pad_to_multiple or 1,
    )


def taken(packing: Packing, segments: np.ndarray) -> int:
    """Slots that segments take in a pack."""
    return int(rooms(segments, packing.pad_to_multiple or 1)[:, LENGTH].sum())


@pytest.mark.thorough
@examples(120, many=600)
@given(case=cases(tuple(ORACLES)))
def test_kernels_equal_plain_python_segment_by_segment(case):
    packing, rows = case
    oracle = ORACLES[packing.method]
    before = oracles.in_rooms(oracle, rules_of(packing), rows.tolist(), final=False)
    after = oracles.in_rooms(oracle, rules_of(packing), rows.tolist(), final=True)
    packer = make_packer(packing)

    added = as_lists(packer.add(rows))

    assert added == before.packs
    assert packer.state_dict()["buffered"] == before.pool
    assert added + as_lists(packer.flush()) == after.packs
    if packing.method == "next_fit":
        high_water = packer.high_water
        assert high_water == (after.high_tokens, after.high_samples)


@given(case=cases())
def test_every_token_is_packed_exactly_once_and_pieces_stay_in_order(case):
    packing, rows = case
    packer = make_packer(packing)

    segments = pack_all(packer, rows).segments

    assert not len(packer.buffered)
    for row in rows:
        pieces = segments[segments[:, SAMPLE] == row[SAMPLE]]
        edges = np.append(pieces[:, START], row[START] + row[LENGTH])
        assert edges[0] == row[START]
        assert np.array_equal(edges[:-1] + pieces[:, LENGTH], edges[1:])
        assert (pieces[:, LENGTH] > 0).all()
        assert (pieces[:, [STREAM, PASS, TOTAL]] == row[[STREAM, PASS, TOTAL]]).all()


@given(case=cases())
def test_packs_are_within_their_limits_and_only_the_end_of_a_sample_has_padding(case):
    packing, rows = case

    packs = pack_all(make_packer(packing), rows)

    for pack in range(len(packs)):
        assert 1 <= taken(packing, packs[pack]) <= packing.max_seq_len
        assert len(packs[pack]) <= (packing.max_samples_per_pack or len(rows))
    segments = packs.segments
    inner = segments[:, START] + segments[:, LENGTH] < segments[:, TOTAL]
    assert not (segments[inner, LENGTH] % (packing.pad_to_multiple or 1)).any()


@given(case=cases())
def test_a_pack_has_one_cut_at_most_and_none_but_with_concat(case):
    packing, rows = case

    packs = pack_all(make_packer(packing), rows)

    ends = rows[:, START] + rows[:, LENGTH]
    for pack in range(len(packs)):
        segments = packs[pack]
        cuts = np.flatnonzero(segments[:, START] + segments[:, LENGTH] < ends[segments[:, SAMPLE]])
        # A cut segment is the last of its pack.
        assert cuts.tolist() in ([], [len(segments) - 1])
        assert packing.method == "concat" or not len(cuts)


@given(case=cases(), chunks=st.lists(st.integers(1, 9), min_size=1))
def test_buffers_stay_within_their_bounds_and_high_water_is_the_most_seen(case, chunks):
    packing, rows = case
    packer = make_packer(packing)

    begin, most = 0, (0, 0)
    num_out = 0
    while begin < len(rows):
        size = chunks[begin % len(chunks)]
        num_out += packer.add(rows[begin : begin + size]).segments[:, LENGTH].sum()
        begin += size
        held = packer.buffered
        most = max(most[0], taken(packing, held)), max(most[1], len(held))
        assert num_out + packer.buffered[:, LENGTH].sum() == rows[:begin, LENGTH].sum()
    packer.flush()

    assert most[0] <= packer.high_water[0] <= packing.buffer_limit
    assert most[1] <= packer.high_water[1] <= packing.buffer_samples


@given(case=cases(STEADY), size=st.integers(1, 20))
def test_packs_do_not_depend_on_how_segments_are_dealt_to_calls(case, size):
    packing, rows = case
    whole, dealt = make_packer(packing), make_packer(packing)

    expected = as_lists(whole.add(rows))
    found = [
        pack
        for begin in range(0, len(rows), size)
        for pack in as_lists(dealt.add(rows[begin : begin + size]))
    ]

    assert found == expected
    assert dealt.state_dict() == whole.state_dict()
    assert as_lists(dealt.flush()) == as_lists(whole.flush())


@given(case=cases())
def test_a_packer_saved_and_loaded_between_any_two_calls_goes_on_the_same(case):
    packing, rows = case
    straight, packer = make_packer(packing), make_packer(packing)

    for place in range(len(rows)):
        state = json.loads(json.dumps(packer.state_dict()))
        assert packer.state_dict() == state  # asking changes nothing
        packer = make_packer(packing)
        packer.load_state_dict(state)
        expected = straight.add(rows[place : place + 1])
        assert as_lists(packer.add(rows[place : place + 1])) == as_lists(expected)

    assert packer.state_dict() == straight.state_dict()
    assert as_lists(packer.flush()) == as_lists(straight.flush())
