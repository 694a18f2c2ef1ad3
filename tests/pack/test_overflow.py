"""Long samples are split, truncated, dropped or refused."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.pack import count_dropped, fit_samples
from tests.helpers import oracles

NAMES = ["web", "code", "chat"]

samples_lists = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 99), st.integers(0, 50)),
    max_size=40,
).map(lambda rows: np.array([list(row) for row in rows], np.int64).reshape(-1, 4))


@given(
    samples=samples_lists,
    max_seq_len=st.integers(1, 50),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
)
def test_segments_equal_those_made_one_sample_at_a_time(samples, max_seq_len, overflow):
    before = samples.copy()

    segments = fit_samples(samples, max_seq_len, overflow, NAMES)

    assert segments.dtype == np.int64
    assert segments.shape[1] == 6
    assert segments.tolist() == oracles.fit_samples(samples.tolist(), max_seq_len, overflow)
    assert np.array_equal(samples, before)


@given(
    samples=samples_lists,
    max_seq_len=st.integers(1, 50),
    overflow=st.sampled_from(["split", "truncate", "drop"]),
)
def test_samples_without_a_segment_are_counted_by_stream(samples, max_seq_len, overflow):
    counts = count_dropped(samples, max_seq_len, overflow, len(NAMES))

    left_out = [
        row[0] for row in samples.tolist() if not oracles.fit_samples([row], max_seq_len, overflow)
    ]
    assert counts.tolist() == [left_out.count(stream) for stream in range(len(NAMES))]


def test_a_sample_of_a_million_packs_is_split_without_a_loop():
    segments = fit_samples(np.array([[0, 0, 3, 10**6 * 4 + 1]]), 4, "split", NAMES)

    assert segments.shape == (10**6 + 1, 6)
    assert segments[-1].tolist() == [0, 0, 3, 4 * 10**6, 1, 4 * 10**6 + 1]
