"""Who is next among sources of unknown lengths: shares kept to one sample at every moment."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import ResumeError
from streampack.mix import Deficits
from streampack.mix.deficit import num_served

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
    amounts=amounts_of_some,
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=200),
)
def test_in_tokens_no_source_runs_ahead_by_more_than_its_longest_sample(amounts, lengths):
    turns, served = Deficits(amounts, "tokens"), [0] * len(amounts)
    longest = [0] * len(amounts)

    for length in lengths:
        source = turns.next()
        turns.serve(source, length)
        served[source] += length
        longest[source] = max(longest[source], length)
        for number, amount in enumerate(amounts):
            target = sum(served) * amount / sum(amounts)
            others = sum(longest) - longest[number]
            assert -others - 1e-3 <= served[number] - target <= longest[number] + 1e-3


def served_one_by_one(turns, waiting, room):
    """Serve as `serve_waiting` does, by its definition; return the sources and the room left."""
    queues, served, by_samples = [list(each) for each in waiting], [], turns._by_samples
    tokens, samples, wanted = room
    while (tokens >= 0 and samples >= 0) or wanted > 0:
        source = turns.next()
        if source is None or not queues[source]:
            break
        length = queues[source].pop(0)
        turns.serve(source, 1 if by_samples else length)
        served.append(source)
        tokens, samples, wanted = tokens - length, samples - 1, wanted - length
    return served, [tokens, samples, wanted]


@given(
    amounts=amounts_of_some,
    unit=st.sampled_from(["samples", "tokens"]),
    seed=st.integers(0, 9),
    longest=st.sampled_from([1, 300, 2**31 - 1]),
    calls=st.lists(
        st.tuples(st.integers(0, 40), st.integers(-1, 60), st.integers(0, 40)),
        min_size=1,
        max_size=6,
    ),
)
def test_samples_that_wait_are_served_as_one_by_one(amounts, unit, seed, longest, calls):
    """Where deficits are too large for the kernel, it stops, and the others follow one by one."""
    together, alone = Deficits(amounts, unit), Deficits(amounts, unit)
    generator = np.random.default_rng(seed)
    for most, samples, expected in calls:
        waiting = [
            generator.integers(1, longest, generator.integers(0, 30), endpoint=True).tolist()
            for _ in amounts
        ]
        room = [most * longest // 2, samples, expected * longest // 2]
        left = np.array(room)
        arrays = [np.array(each, np.int64) for each in waiting]
        served = together.serve_waiting(arrays, left).tolist()
        if longest > 300:
            rest = [each[served.count(number) :] for number, each in enumerate(waiting)]
            more, left = served_one_by_one(together, rest, left.tolist())
            served += more
        assert (served, list(left)) == served_one_by_one(alone, waiting, room)
        assert together.state_dict() == alone.state_dict()


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    room=st.tuples(st.integers(-9, 3000), st.integers(-1, 60), st.integers(-9, 3000)),
    unit=st.sampled_from(["samples", "tokens"]),
)
def test_samples_of_a_source_that_is_alone_are_served_as_by_deficits(lengths, room, unit):
    of_one, left, waiting = np.array(room), np.array(room), np.array(lengths, np.int64)

    num = num_served(waiting, of_one)

    assert num == len(Deficits([3], unit).serve_waiting([waiting], left))
    assert of_one.tolist() == left.tolist()


@given(
    amounts=amounts_of_some,
    lengths=st.lists(st.integers(1, 5000), max_size=40),
    unit=st.sampled_from(["samples", "tokens"]),
    kept=st.integers(0, 40),
)
def test_what_is_taken_back_was_never_served(amounts, lengths, unit, kept):
    turns, fewer = Deficits(amounts, unit), Deficits(amounts, unit)
    back = [0] * len(amounts)
    for number, length in enumerate(lengths):
        source, amount = turns.next(), 1 if unit == "samples" else length
        turns.serve(source, amount)
        if number < kept:
            fewer.serve(source, amount)
        else:
            back[source] += amount
    turns.undo(back)

    assert turns.state_dict() == fewer.state_dict()


def test_deficits_beyond_int64_serve_one_by_one():
    turns = Deficits([1, 1], "tokens")
    turns.serve(0, 1 << 40)
    before, room = turns.state_dict(), np.array([9, 9, 9])
    assert turns.serve_waiting([np.array([1]), np.array([1])], room).tolist() == []
    assert turns.state_dict() == before
    assert room.tolist() == [9, 9, 9]
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


def test_a_state_of_another_number_of_sources_is_refused():
    with pytest.raises(ResumeError, match="of 2 sources and deficits of 2, but there are 3; load"):
        Deficits([1, 2, 3], "samples").load_state_dict(Deficits([1, 2], "samples").state_dict())
