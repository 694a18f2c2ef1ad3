"""Best-fit decreasing over windows: what one window passes to the next, and the fill."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.config import Packing
from streampack.pack import make_packer
from streampack.pack.buffered import rooms
from streampack.types import LENGTH, SAMPLE, Packs
from tests.helpers import oracles
from tests.helpers.examples import examples
from tests.helpers.oracles import rows_of

METHOD = "best_fit_decreasing"


@st.composite
def windows_of(draw) -> tuple[Packing, list[np.ndarray]]:
    """A packing, and the segments of a few windows."""
    size = draw(st.sampled_from([1, 2, 8, 64, 65, 1000, 5000, 300_000]))
    multiple = draw(st.sampled_from([None, None, 8])) if size % 8 == 0 else None
    length = st.one_of(
        st.integers(1, size),
        st.integers(max(1, size // 3), max(1, 2 * size // 3)),
        st.sampled_from([1, size, max(1, size // 2), size // 2 + 1]),
    )
    parts = draw(st.lists(st.lists(length, max_size=30), min_size=1, max_size=4))
    rows = rows_of([length for part in parts for length in part])
    ends = np.cumsum([len(part) for part in parts])
    packing = Packing(
        max_seq_len=size,
        method=METHOD,
        buffer_tokens=draw(st.sampled_from([None, size, 2 * size])),
        buffer_samples=draw(st.sampled_from([1, 3, 4096])),
        max_samples_per_pack=draw(st.sampled_from([None, None, 1, 2, 5])),
        pad_to_multiple=multiple,
    )
    return packing, np.split(rows, ends[:-1])


def as_lists(packs: Packs) -> list[list[list[int]]]:
    return [packs[pack].tolist() for pack in range(len(packs))]


@examples(80, many=400)
@given(case=windows_of())
def test_windows_are_packed_as_in_plain_python(case):
    packing, windows = case
    rules = oracles.Rules(
        max_seq_len=packing.max_seq_len,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.buffer_samples,
        max_samples=packing.max_samples_per_pack,
        multiple=packing.pad_to_multiple or 1,
    )
    packer = make_packer(packing)

    def expect(rows: np.ndarray, *, final: bool) -> oracles.Run:
        held, waited = packer.buffered.tolist(), packer.state_dict()["waited"]

        def oracle(rules, rows, *, final):
            return oracles.best_fit_decreasing(rules, rows, final=final, waited=waited)

        return oracles.in_rooms(oracle, rules, held + rows.tolist(), final=final)

    for window in windows:
        expected = expect(window, final=False) if len(window) else None
        packs = as_lists(packer.add(window))
        if expected is None:
            assert not packs
        else:
            assert packs == expected.packs
            assert packer.buffered.tolist() == expected.pool
    expected = expect(windows[0][:0], final=True)
    assert as_lists(packer.flush()) == expected.packs
    assert not len(packer.buffered)


@given(case=windows_of())
def test_every_segment_leaves_once_with_its_window_or_the_next_that_gives_packs(case):
    packing, windows = case
    windows = [np.concatenate([window] * 8) for window in windows if len(window)]
    for number, window in enumerate(windows):
        window[:, SAMPLE] = np.arange(len(window)) + sum(map(len, windows[:number]))
    packer = make_packer(packing)
    left: list[int] = []

    for window in windows:
        held = packer.buffered[:, SAMPLE]
        waited = set(held[np.array(packer.state_dict()["waited"], np.int64) > 0].tolist())
        left += packer.add(window).segments[:, SAMPLE].tolist()
        assert not waited & set(packer.buffered[:, SAMPLE].tolist())
        held = rooms(packer.buffered, packing.pad_to_multiple or 1)
        assert held[:, LENGTH].sum() <= packer.high_water[0] <= packing.buffer_limit
        assert len(held) <= packer.high_water[1] <= packing.buffer_samples
    left += packer.flush().segments[:, SAMPLE].tolist()

    assert sorted(left) == list(range(sum(map(len, windows))))


def test_packs_leave_in_the_order_in_which_their_longest_segments_arrived():
    lengths = np.random.default_rng(0).integers(1, 1025, 5000)
    packs = make_packer(Packing(max_seq_len=1024, method=METHOD)).add(rows_of(lengths))

    longest = [
        packs[pack][np.argmax(packs[pack][:, LENGTH]), [SAMPLE, LENGTH]]
        for pack in range(len(packs))
    ]
    samples, longest_lengths = np.transpose(longest)

    assert (np.diff(samples) > 0).all()
    # So that the lengths of packs do not fall over a window.
    halves = np.array_split(longest_lengths, 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.05 * longest_lengths.mean()
