"""Choosing among sources of unknown lengths keeps shares exact to one sample at all times."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.mix.deficit import Deficits

amounts_of_some = st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any)


@given(amounts=amounts_of_some, num_turns=st.integers(1, 300))
def test_in_samples_every_source_is_within_one_sample_of_its_share_at_all_times(amounts, num_turns):
    turns, served = Deficits(amounts, "samples"), [0] * len(amounts)

    for turn in range(1, num_turns + 1):
        source = turns.next()
        turns.serve(source, 1)
        served[source] += 1
        for got, amount in zip(served, amounts, strict=True):
            assert abs(got * sum(amounts) - turn * amount) <= sum(amounts) * (1 + 1e-6)


@given(
    amounts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    lengths=st.lists(st.lists(st.integers(1, 20), max_size=12), min_size=4, max_size=4),
    room=st.tuples(st.integers(0, 150), st.integers(0, 30)),
    unit=st.sampled_from(["samples", "tokens"]),
)
def test_samples_that_wait_are_served_as_one_by_one(amounts, lengths, room, unit):
    together, alone = Deficits(amounts, unit), Deficits(amounts, unit)
    waiting = [np.array(own, np.int64) for own in lengths[: len(amounts)]]
    left = np.array(room)
    served = together.serve_waiting(waiting, left).tolist()

    tokens, samples = room
    expected, queues = [], [own.tolist() for own in waiting]
    while tokens > 0 and samples > 0 and queues[source := alone.next()]:
        length = queues[source].pop(0)
        alone.serve(source, length if unit == "tokens" else 1)
        tokens, samples = tokens - length, samples - 1
        expected.append(source)
    assert served == expected
    assert left.tolist() == [tokens, samples]
    assert together.state_dict() == alone.state_dict()


def test_deficits_beyond_int64_serve_one_by_one():
    turns = Deficits([1, 1], "tokens")
    turns.serve(0, 1 << 40)
    before, room = turns.state_dict(), np.array([9, 9])
    assert turns.serve_waiting([np.array([1]), np.array([1])], room).tolist() == []
    assert turns.state_dict() == before
    assert room.tolist() == [9, 9]
    assert turns.next() == 1


def test_a_source_that_ends_leaves_the_others_their_shares():
    turns, served = Deficits([2, 1, 1], "samples"), [0, 0, 0]
    turns.end(0)
    for _ in range(10):
        source = turns.next()
        turns.serve(source, 1)
        served[source] += 1

    assert served == [0, 5, 5]
    turns.end(1)
    turns.end(2)
    assert turns.next() is None


@given(amounts=amounts_of_some, at=st.integers(0, 50), unit=st.sampled_from(["samples", "tokens"]))
def test_a_state_goes_on_where_it_was_taken(amounts, at, unit):
    first, second = Deficits(amounts, unit), Deficits(amounts, unit)
    for turn in range(at):
        first.serve(first.next(), 1 if unit == "samples" else turn + 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    for turn in range(20):
        source = first.next()
        assert second.next() == source
        first.serve(source, 1 if unit == "samples" else turn + 1)
        second.serve(source, 1 if unit == "samples" else turn + 1)
