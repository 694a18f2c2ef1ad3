"""Random runs over real files, compared with an oracle in plain Python that only knows the data.

A case has random streams, lengths, weights, lanes, packers, methods and worlds. The batches of one
process are checked sample by sample. Another world, resumed in the middle, must deliver the same
packs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import PackedDataLoader
from tests.helpers.conformance import check_tokens, rows, segments_of
from tests.helpers.random_runs import Case

NUM_PARTS = 10


def batches_of(loader: PackedDataLoader, num_epochs: int) -> list[dict[str, Any]]:
    return [batch for _ in range(num_epochs) for batch in loader]


def packs_of(case: Case, batches: list[dict[str, Any]]) -> Counter:
    """The packs of batches, grouped by global batch; balance only moves packs within one."""
    packs: Counter = Counter()
    for batch in batches:
        last = max(batch["position"] - 1, 0) // case.size
        packs.update((batch["epoch"], last, *row) for row in rows(batch))
    return packs


def check_another_world(
    case: Case, whole: list[dict[str, Any]], num_epochs: int, **options
) -> None:
    """Two ranks, both started from a state of a single rank, deliver the rest of the epoch."""
    loader = case.loader(**options)
    stop = case.dice.randrange(len(whole))
    stop -= stop % (
        case.size // 2
    )  # at a global batch, so that whole steps of the other world are left
    state = json.dumps(loader.state_dict())
    taken = 0
    while taken < stop:
        for _ in islice(loader, stop - taken):
            taken += 1
        state = json.dumps(loader.state_dict())
    rest: list[dict[str, Any]] = []
    for rank in range(2):
        other = case.loader(rank, 2, **options)
        other.load_state_dict(json.loads(state))
        left = num_epochs - json.loads(state)["epoch"] if case.kind != "chapters" else 1
        own = batches_of(other, left)
        rest += [batch for batch in own if batch["epoch"] < num_epochs or case.kind == "chapters"]
    assert packs_of(case, rest) == packs_of(case, whole[stop:])


def check_rows(case: Case, batches: list[dict[str, Any]]) -> None:
    """Every token and label is that of its sample, and batches of one stream have no other."""
    for batch in batches:
        check_tokens(batch, case.written)
        streams = set(batch["segments"][:, 1].tolist())
        assert case.method in ("random", "stratified") or len(streams) <= 1


def check_pieces(case: Case, batches: list[dict[str, Any]], *, is_whole: bool) -> Counter:
    """Check that the pieces of a sample follow each other without gaps or overlaps in each pass.

    Return how often each sample was begun, by stream and sample.
    """
    pieces = defaultdict(list)
    for stream, number, sample, start, length in segments_of(
        row for batch in batches for row in rows(batch)
    ).tolist():
        pieces[stream, number, sample].append((start, length))
    uses: Counter = Counter()
    for (stream, _, sample), own in pieces.items():
        own.sort()
        ends = [start + length for start, length in own]
        assert all(end <= nxt for end, (nxt, _) in zip(ends, own[1:], strict=False)), "twice"
        if is_whole:
            assert [0, *ends] == [
                *(start for start, _ in own),
                case.written.lengths[stream][sample],
            ]
        uses[stream, sample] += 1
    return uses


def play_epochs(folder: Path, number: int) -> None:
    """Every sample of a stream is used equally often, and as often as configured."""
    case = Case(folder, "pad", number)
    whole = batches_of(case.loader(), 2)
    check_rows(case, whole)
    uses = check_pieces(case, whole, is_whole=True)
    for stream, (times, lengths) in enumerate(zip(case.times, case.written.lengths, strict=True)):
        assert {uses[stream, sample] for sample in range(len(lengths))} == {2 * times}
    check_another_world(case, whole, 2)


def play_carry(folder: Path, number: int) -> None:
    """Uses of two samples of a stream never differ by more than 2, or 3 with several streams."""
    case = Case(folder, "carry", number)
    whole = batches_of(case.loader(), 4)
    check_rows(case, whole)
    most = 2 if len(case.names) == 1 else 3
    for part in range(1, NUM_PARTS + 1):
        uses = check_pieces(case, whole[: len(whole) * part // NUM_PARTS], is_whole=False)
        for stream, lengths in enumerate(case.written.lengths):
            own = [uses[stream, sample] for sample in range(len(lengths))]
            assert max(own) - min(own) <= most
    check_another_world(case, whole, 4)


def play_chapters(folder: Path, number: int) -> None:
    """A chapter delivers its own streams, amended or not, and a resume replays the changes."""
    case = Case(folder, "chapters", number)
    loader, whole = case.loader(), []
    at = case.dice.randrange(len(loader))
    own = {case.dice.choice(case.names): 1}
    mixtures = [set(chapter.weights) for chapter in case.chapters]
    state = None
    for batch in loader:
        whole.append(batch)
        if len(whole) == at + 1 and not is_last_step(case, batch):
            loader.amend(weights=own)
            state = json.dumps(loader.state_dict())
    check_rows(case, whole)
    check_pieces(case, whole, is_whole=False)
    steps = [chapter["steps"] for chapter in loader.state_dict()["chapters"]]
    if state is not None:
        running = whole[at]["epoch"]
        is_replaced = len(steps) == len(case.chapters)
        mixtures[running + (not is_replaced) : running + 1] = [set(own)]
    for batch in whole:
        used = {case.names[stream] for stream in batch["segments"][:, 1].tolist()}
        assert used <= mixtures[batch["epoch"]]
    if state is None:
        check_another_world(case, whole, 1)
        return
    edited = [*case.chapters, case.chapter()]
    resumed = [case.loader(chapters=edited), case.loader(chapters=edited)]
    for other in resumed:
        other.load_state_dict(json.loads(state))
    first, second = (list(other) for other in resumed)
    assert packs_of(case, first) == packs_of(case, second)
    assert packs_of(case, first[: len(whole) - at - 1]) == packs_of(case, whole[at + 1 :])
    used = {case.names[n] for batch in first[len(whole) - at - 1 :] for n in streams_in(batch)}
    assert used <= set(edited[-1].weights)


def streams_in(batch: dict[str, Any]) -> set[int]:
    return set(batch["segments"][:, 1].tolist())


def is_last_step(case: Case, batch: dict[str, Any]) -> bool:
    """Whether a batch is in its chapter's last global batch, which can no longer be amended."""
    return -(-batch["position"] // case.size) == case.chapters[batch["epoch"]].steps


PLAYS = {"epochs": play_epochs, "carry": play_carry, "chapters": play_chapters}


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", PLAYS)
def test_a_random_run_is_what_the_oracle_says(kind, number, tmp_path):
    PLAYS[kind](tmp_path, number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAYS)
def test_so_are_five_hundred(kind, tmp_path):
    for number in range(100, 600):
        PLAYS[kind](tmp_path, number)
