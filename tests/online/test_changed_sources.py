"""Sources that changed since a state was saved are refused by name."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import (
    Buffers,
    ConfigError,
    DataError,
    IterableStream,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    Payloads,
    ResumeError,
)
from tests.helpers.batches import same
from tests.helpers.examples import examples
from tests.helpers.iterables import Again, ByChar, WithState, rows_of

LENGTHS = [7, 12, 30, 2, 9, 11, 31, 3, 5, 21] * 8
WAY_OUT = r"; a source must give the same samples .* or start again without the state"


def dataset(
    source, order: Order | None = None, buffers: Buffers | None = None, **stream
) -> PackedIterableDataset:
    """One source, named "a", in packs of 32."""
    options = {"tokens": "tokens"} | stream
    return PackedIterableDataset(
        [IterableStream(source, name="a", **options)],
        packing=Packing(max_seq_len=32, buffer_tokens=256),
        order=order,
        buffers=buffers,
    )


def state_after(made, num_batches: int):
    """The state of a dataset that has delivered so many batches, as JSON gives it back."""
    batches = iter(made)
    for _ in range(num_batches):
        next(batches)
    return json.loads(json.dumps(made.state_dict()))


def resumed(made, state):
    made.load_state_dict(state)
    return next(iter(made))


def read_again(state) -> range:
    """The numbers of the samples that a resume reads again."""
    queue = state["flow"]["queues"][0]
    first = queue["streams"][0]["start"][1]
    return range(first, first + sum(counts[0] for counts, _ in queue["drawn"]))


CHANGED = r"stream 'a': samples (\d+) to (\d+) of pass 0 have other tokens, labels or fields.*"


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("order", [None, Order(seed=3)])
def test_a_list_that_lost_or_got_a_sample_is_refused(order, at):
    rows = rows_of(0, LENGTHS)
    state = state_after(dataset(rows, order), 9)
    fewer = rows[1:] if at == 0 else rows[:-1]

    for others in (fewer, [*rows, [5, 6]]):
        message = rf"stream 'a': its source has {len(others)} samples, but had 80 when" + ".*"
        with pytest.raises(DataError, match=message + WAY_OUT):
            resumed(dataset(others, order), state)


def test_a_sample_whose_first_pieces_were_delivered_is_looked_at_too():
    rows = rows_of(0, [400, 8])
    buffers = Buffers(worker_tokens=256 + 32 + 100)  # a window of a pack
    state = state_after(dataset(Again(rows), buffers=buffers), 2)
    rows[0][-1] += 1
    with pytest.raises(DataError, match=CHANGED):
        resumed(dataset(Again(rows), buffers=buffers), state)


@pytest.mark.parametrize("field", ["labels", "mask", "weight", "span"])
def test_what_lies_beside_the_tokens_is_looked_at_too(field):
    rows = [
        {
            "tokens": row,
            "labels": list(row),
            "mask": [1] * len(row),
            "weight": [0.5] * len(row),
            "image": b"x",
            "span": [0, 1],
        }
        for row in rows_of(0, LENGTHS)
    ]
    options = {
        "labels": {"labels": "labels", "labels_shifted": False},
        "mask": {"loss_mask": "mask"},
        "weight": {"token_fields": {"weight": "float32"}},
        "span": {"payloads": Payloads({"image": "span"})},
    }[field]
    state = state_after(dataset(rows, **options), 9)
    number = read_again(state)[5]
    rows[number][field] = {
        "labels": [-100] * len(rows[number]["tokens"]),
        "mask": [0] * len(rows[number]["tokens"]),
        "weight": [0.25] * len(rows[number]["tokens"]),
        "span": [0, 2],
    }[field]

    with pytest.raises(DataError, match=CHANGED + WAY_OUT):
        resumed(dataset(rows, **options), state)


@examples(30)
@given(data=st.data())
def test_no_change_of_a_token_in_two_windows_goes_unseen(data):
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=8, max_size=40), "lengths")
    rows = [
        [data.draw(st.integers(0, 3)) for _ in range(min(n, 3))] * (n // 3 + 1) for n in lengths
    ]
    made = dataset(rows)
    num_batches = sum(1 for _ in made)
    state = state_after(dataset(rows), data.draw(st.integers(1, num_batches), "batches"))
    assert resumed(dataset(rows), state) is not None
    number = data.draw(st.sampled_from(read_again(state)), "sample")
    place = data.draw(st.integers(0, len(rows[number]) - 1), "place")
    rows[number] = [*rows[number]]
    rows[number][place] += data.draw(st.sampled_from([1, 2, 1000, 2**20]), "by")

    with pytest.raises(DataError, match=CHANGED) as refused:
        resumed(dataset(rows), state)
    first, last = map(int, re.search(CHANGED, str(refused.value)).groups())
    assert first <= number <= last


def test_another_tokenizer_of_the_same_kind_is_refused():
    texts = ["abc" * n for n in (3, 4, 7, 2, 9) * 8]
    state = state_after(dataset(texts, tokenizer=ByChar()), 5)

    with pytest.raises(DataError, match=CHANGED):
        resumed(dataset(texts, tokenizer=ByChar(1)), state)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_and_its_workers_refuse_it_too(num_workers):
    rows = rows_of(0, LENGTHS)
    loader = PackedDataLoader(dataset(rows), num_workers=num_workers)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    again = PackedDataLoader(dataset(rows[::-1]), num_workers=num_workers)
    again.load_state_dict(state)

    with pytest.raises(DataError, match=CHANGED + WAY_OUT):
        list(again)


def test_lists_and_arrays_of_the_same_tokens_are_the_same():
    rows = rows_of(0, LENGTHS)
    state = state_after(dataset(rows), 9)
    expected = list(dataset(rows))[9]

    for kind in (np.array, tuple):
        assert same(resumed(dataset([kind(row) for row in rows]), state), expected)


def test_a_last_sample_long_ago_keeps_no_states_of_the_source():
    rows = [[1] * 32, *[[1] * 40] * 900, [2] * 32, [3] * 32]
    source = WithState(rows)
    made = PackedIterableDataset(
        [IterableStream(source, name="a")], packing=Packing(max_seq_len=32, overflow="drop")
    )
    batches = iter(made)
    next(batches)
    next(batches)
    [[(_, taken, *_)]] = made.state_dict()["sources"]
    assert taken == 64, "after a window"


def test_a_source_that_is_shorter_or_takes_no_state_is_refused():
    rows = rows_of(0, [8] * 300)
    state = state_after(dataset(Again(rows)), 50)
    with pytest.raises(DataError, match=r"stream 'a': the state is .* but the source gave 5"):
        resumed(dataset(Again(rows[:5])), state)
    state = state_after(dataset(WithState(rows)), 50)
    with pytest.raises(ConfigError, match="Again has no load_state_dict"):
        resumed(dataset(Again(rows)), state)


def test_a_state_of_an_earlier_version_is_refused_with_what_to_do():
    state = dataset(rows_of(0, LENGTHS)).state_dict() | {"version": 2}

    with pytest.raises(ResumeError, match=r"version 2, this release reads 8; .*release that saved"):
        dataset(rows_of(0, LENGTHS)).load_state_dict(state)


def test_a_sample_that_a_shorter_pass_does_not_give_again_is_refused():
    rows = rows_of(0, LENGTHS)
    made = dataset(Again(rows), repeat=2)
    state = state_after(made, 20)
    with pytest.raises(DataError, match=r"stream 'a': .*" + WAY_OUT):
        resumed(dataset(Again(rows[:-1]), repeat=2), state)
