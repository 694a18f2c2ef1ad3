"""Choosing among sources of unknown lengths keeps shares exact to one sample at all times."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streampack.mix.deficit import SHARE_SCALE, Deficits

amounts_of_some = st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any)
units = st.sampled_from(["samples", "tokens"])


def serve_one(turns: Deficits, lengths: list[int]) -> int | None:
    """Serve the sample of whichever source is next, given the length of each one's."""
    served, turn = turns.serve_waiting([np.array([n]) for n in lengths], np.array([1 << 40, 1]))
    return served.tolist()[0] if len(served) else turn


def next_source(deficits: list[Fraction], shares: list[Fraction], unit: str) -> int:
    """The source whose turn it is, by the rules of the module, in fractions."""
    if unit == "tokens":
        keys = {n: deficits[n] + share for n, share in enumerate(shares) if share}
    else:
        keys = {
            n: (deficits[n] - 1) // share
            for n, share in enumerate(shares)
            if share and deficits[n] + share > 0
        }
    return max(keys, key=lambda n: (keys[n], -n))


@given(amounts=amounts_of_some, num_turns=st.integers(1, 300))
def test_in_samples_every_source_is_within_one_sample_of_its_share_at_all_times(amounts, num_turns):
    turns, served = Deficits(amounts, "samples"), [0] * len(amounts)

    for turn in range(1, num_turns + 1):
        served[serve_one(turns, [1] * len(amounts))] += 1
        for got, amount in zip(served, amounts, strict=True):
            assert abs(got * sum(amounts) - turn * amount) <= sum(amounts) * (1 + 1e-6)


@given(
    amounts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    lengths=st.lists(st.lists(st.integers(1, 20), max_size=12), min_size=4, max_size=4),
    room=st.tuples(st.integers(0, 150), st.integers(0, 30)),
    unit=units,
)
def test_samples_that_wait_are_served_by_deficit_while_there_is_room(amounts, lengths, room, unit):
    turns, left = Deficits(amounts, unit), np.array(room)
    queues = lengths[: len(amounts)]
    served, turn = turns.serve_waiting([np.array(own, np.int64) for own in queues], left)

    tokens, samples = room
    shares = [Fraction(share, SHARE_SCALE) for share in turns._shares]
    deficits = [Fraction(0)] * len(shares)
    expected, queues = [], [list(own) for own in queues]
    while queues[source := next_source(deficits, shares, unit)] and tokens > 0 and samples > 0:
        length = queues[source].pop(0)
        amount = 1 if unit == "samples" else length
        deficits = [own + share * amount for own, share in zip(deficits, shares, strict=True)]
        deficits[source] -= amount
        tokens, samples = tokens - length, samples - 1
        expected.append(source)
    assert (served.tolist(), turn) == (expected, source)
    assert left.tolist() == [tokens, samples]
    assert turns.state_dict()["deficits"] == [own * SHARE_SCALE for own in deficits]


def test_a_source_that_ends_leaves_the_others_their_shares():
    turns, served = Deficits([2, 1, 1], "samples"), [0, 0, 0]
    turns.end(0)
    for _ in range(10):
        served[serve_one(turns, [1, 1, 1])] += 1

    assert served == [0, 5, 5]
    turns.end(1)
    turns.end(2)
    assert serve_one(turns, [1, 1, 1]) is None


@given(amounts=amounts_of_some, at=st.integers(0, 50), unit=units)
def test_a_state_goes_on_where_it_was_taken(amounts, at, unit):
    first, second = Deficits(amounts, unit), Deficits(amounts, unit)
    for turn in range(at):
        serve_one(first, [turn + 1] * len(amounts))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    for turn in range(20):
        lengths = [turn + 1] * len(amounts)
        assert serve_one(first, lengths) == serve_one(second, lengths)
