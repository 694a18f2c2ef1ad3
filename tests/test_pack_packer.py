"""Laws that every packer keeps: 1 (nothing lost), 2 (packs fit, one cut), 3 (bounds), 4, 5."""

from __future__ import annotations

import json
import pickle

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import rows_of

from streampack.config import Packing
from streampack.errors import DataError, ResumeError
from streampack.pack import Packer, make_packer
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM, TOTAL, Packs, no_segments

METHODS = ("exact_fit", "next_fit")
SIZES = [1, 2, 3, 7, 8, 16, 63, 64, 65, 128, 500, 1000, 3000, 8192, 20_000]


@st.composite
def cases(draw) -> tuple[Packing, np.ndarray]:
    """A packing and segments that it may meet: tiny, full, just over a half, all alike, pieces."""
    size = draw(st.sampled_from(SIZES))
    one_length = st.one_of(
        st.integers(1, size),
        st.integers(1, max(1, size // 8)),
        st.sampled_from([1, size, size // 2 + 1, max(1, size - 1), max(1, size // 3)]),
        st.integers(1, max(1, size // 64)).map(lambda count: min(64 * count, size)),
    )
    lengths = draw(st.lists(one_length, max_size=60))
    packing = Packing(
        max_seq_len=size,
        method=draw(st.sampled_from(METHODS)),
        buffer_tokens=draw(st.sampled_from([size, size + 1, 2 * size, 8 * size, None])),
        buffer_samples=draw(st.sampled_from([1, 2, 3, 10, 4096])),
        split_gap=draw(st.sampled_from([None, 0.0, 0.01, 0.3])),
    )
    rows = rows_of(lengths)
    # Some are pieces of longer samples: a cut must go on counting from their start.
    starts = draw(st.lists(st.sampled_from([0, size]), min_size=len(rows), max_size=len(rows)))
    rows[:, START] = starts
    rows[:, TOTAL] += rows[:, START]
    return packing, rows


def pack_all(packer: Packer, rows: np.ndarray) -> Packs:
    return Packs.join([packer.add(rows), packer.flush()])


def as_lists(packs: Packs) -> list[list[list[int]]]:
    return [packs[pack].tolist() for pack in range(len(packs))]


def rules_of(packing: Packing) -> oracles.Rules:
    return oracles.Rules(
        max_seq_len=packing.max_seq_len,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.buffer_samples,
        split_gap=packing.split_gap,
    )


@settings(max_examples=300)
@given(case=cases())
def test_kernels_equal_plain_python_segment_by_segment(case):
    packing, rows = case
    oracle = {"exact_fit": oracles.exact_fit, "next_fit": oracles.next_fit}[packing.method]
    before = oracle(rules_of(packing), rows.tolist(), final=False)
    after = oracle(rules_of(packing), rows.tolist(), final=True)
    packer = make_packer(packing)

    added = as_lists(packer.add(rows))

    assert added == before.packs
    assert packer.state_dict()["buffered"] == before.pool
    assert added + as_lists(packer.flush()) == after.packs
    assert (packer.high_water_tokens, packer.high_water_samples) == (
        after.high_tokens,
        after.high_samples,
    )


@given(case=cases())
def test_every_token_is_packed_exactly_once_and_pieces_stay_in_order(case):
    packing, rows = case
    packer = make_packer(packing)

    segments = pack_all(packer, rows).segments

    assert packer.num_buffered_samples == packer.num_buffered_tokens == 0
    for row in rows:
        pieces = segments[segments[:, SAMPLE] == row[SAMPLE]]
        edges = np.append(pieces[:, START], row[START] + row[LENGTH])
        assert edges[0] == row[START]
        assert np.array_equal(edges[:-1] + pieces[:, LENGTH], edges[1:])
        assert (pieces[:, LENGTH] > 0).all()
        assert (pieces[:, [STREAM, PASS, TOTAL]] == row[[STREAM, PASS, TOTAL]]).all()


@given(case=cases())
def test_no_pack_is_empty_or_holds_more_than_max_seq_len(case):
    packing, rows = case

    packs = pack_all(make_packer(packing), rows)

    for pack in range(len(packs)):
        assert 1 <= packs[pack][:, LENGTH].sum() <= packing.max_seq_len


@given(case=cases())
def test_a_pack_has_one_cut_at_most_and_none_without_split_gap(case):
    packing, rows = case

    packs = pack_all(make_packer(packing), rows)

    ends = rows[:, START] + rows[:, LENGTH]
    fragment = min(64, max(1, packing.max_seq_len // 8))
    for pack in range(len(packs)):
        segments = packs[pack]
        cuts = np.flatnonzero(segments[:, START] + segments[:, LENGTH] < ends[segments[:, SAMPLE]])
        tails = np.flatnonzero(segments[:, START] > rows[segments[:, SAMPLE], START])
        # A cut segment is the last of its pack, and its tail the first of a later one.
        assert cuts.tolist() in ([], [len(segments) - 1])
        assert tails.tolist() in ([], [0])
        assert (segments[np.append(cuts, tails), LENGTH] >= fragment).all()
        if packing.split_gap is None:
            assert not len(cuts)


@given(case=cases(), chunks=st.lists(st.integers(1, 9), min_size=1))
def test_buffers_stay_within_their_bounds_and_high_water_is_the_most_seen(case, chunks):
    packing, rows = case
    packer = make_packer(packing)

    begin, most = 0, (0, 0)
    while begin < len(rows):
        size = chunks[begin % len(chunks)]
        packer.add(rows[begin : begin + size])
        begin += size
        held = packer.num_buffered_tokens, packer.num_buffered_samples
        most = max(most[0], held[0]), max(most[1], held[1])
    packer.flush()

    assert most[0] <= packer.high_water_tokens <= packing.buffer_limit
    assert most[1] <= packer.high_water_samples <= packing.buffer_samples


@given(case=cases(), size=st.integers(1, 20))
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


@given(case=cases(), more=st.lists(st.integers(1, 8), max_size=10))
def test_packs_depend_only_on_segments_that_came_before_them(case, more):
    packing, rows = case
    lengths = [min(length, packing.max_seq_len) for length in more]

    first = as_lists(make_packer(packing).add(rows))
    longer = np.concatenate([rows, rows_of(lengths)])

    assert as_lists(make_packer(packing).add(longer))[: len(first)] == first


@pytest.mark.parametrize("method", METHODS)
def test_adding_leaves_the_callers_rows_alone(method):
    rows = rows_of([70] * 50)
    packer = make_packer(Packing(max_seq_len=100, method=method, split_gap=0.0))

    packs = pack_all(packer, rows)

    assert len(packs.segments) > len(rows)  # some were cut
    assert np.array_equal(rows, rows_of([70] * 50))


@pytest.mark.parametrize("method", METHODS)
def test_no_segments_give_no_packs(method):
    packer = make_packer(Packing(max_seq_len=8, method=method))

    assert len(packer.add(no_segments())) == 0
    assert len(packer.flush()) == 0
    assert packer.state_dict()["buffered"] == []


@pytest.mark.parametrize("method", METHODS)
def test_a_packer_survives_pickling(method):
    packer = make_packer(Packing(max_seq_len=100, method=method))
    packer.add(rows_of([60, 60, 60]))

    copied = pickle.loads(pickle.dumps(packer))

    assert copied.state_dict() == packer.state_dict()
    assert as_lists(copied.flush()) == as_lists(packer.flush())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [0, 9])
def test_a_segment_that_no_pack_can_hold_is_refused_by_name(method, length):
    packer = make_packer(Packing(max_seq_len=8, method=method))

    with pytest.raises(
        DataError,
        match=rf"stream \d, sample 1: a segment of {length} tokens.*1 to .*=8: pass .*fit_samples",
    ):
        packer.add(rows_of([3, length]))
    assert packer.num_buffered_samples == 0


def test_a_state_of_another_method_is_refused():
    state = make_packer(Packing(max_seq_len=8, method="next_fit")).state_dict()

    with pytest.raises(ResumeError, match="'next_fit', this packer is 'exact_fit'; resume with"):
        make_packer(Packing(max_seq_len=8)).load_state_dict(state)


@pytest.mark.parametrize(
    "small",
    [Packing(max_seq_len=100, buffer_tokens=100), Packing(max_seq_len=100, buffer_samples=1)],
)
def test_a_state_that_passes_the_buffers_bounds_is_refused(small):
    packer = make_packer(Packing(max_seq_len=100))
    packer.add(rows_of([60, 60]))

    with pytest.raises(ResumeError, match="buffers 120 tokens in 2 samples, more than buffer_tok"):
        make_packer(small).load_state_dict(packer.state_dict())


def test_a_state_with_a_segment_longer_than_a_pack_is_refused():
    packer = make_packer(Packing(max_seq_len=100))
    packer.add(rows_of([60]))

    with pytest.raises(
        ResumeError,
        match=r"state buffers stream .* 60 tokens.*=50; resume with the packing that was saved",
    ):
        make_packer(Packing(max_seq_len=50)).load_state_dict(packer.state_dict())
