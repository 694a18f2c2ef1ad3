"""Sources of samples for tests of iterables, and what their batches must contain."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.helpers.batches import same


def rows_of(number: int, lengths: list[int]) -> list[list[int]]:
    """Token lists in which every token encodes its stream, sample and position."""
    return [
        [number * 10**6 + index * 10**3 + i for i in range(length)]
        for index, length in enumerate(lengths)
    ]


class Again:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class WithState:
    """An iterable that resumes from its state, and counts its items over all iterations."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.at = 0
        self.num_given = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for index in range(start, len(self.rows)):
            self.at = index + 1
            self.num_given += 1
            yield self.rows[index]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class ByChar:
    """A tokenizer that takes each character for a token, counted from `first`."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[self.first + ord(character) for character in text] for text in texts]


def pieces(batches: list[dict[str, Any]]) -> dict[tuple[int, int, int], list[int]]:
    """Return the tokens of each (stream, pass, sample), joined from the segments of batches."""
    found: dict[tuple[int, int, int], list[tuple[int, list[int]]]] = {}
    for batch in batches:
        filled = [0] * len(batch["tokens"])
        for row, stream, pass_, sample, start, length in batch["segments"].tolist():
            stop = filled[row] + length
            tokens = batch["tokens"][row, filled[row] : stop].tolist()
            found.setdefault((stream, pass_, sample), []).append((start, tokens))
            filled[row] = stop
    together = {}
    for key, parts in found.items():
        parts.sort()
        starts = [start for start, _ in parts]
        assert starts == list(itertools.accumulate([0, *(len(t) for _, t in parts)][:-1]))
        together[key] = [token for _, tokens in parts for token in tokens]
    return together


def with_states(dataset: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the batches of a dataset or loader, and its state after each of them."""
    batches, states = [], []
    for batch in dataset:
        batches.append(batch)
        states.append(json.dumps(dataset.state_dict()))
    return batches, states


def assert_continues(dataset: Any, state: str, rest: list[dict[str, Any]]) -> None:
    """Assert that a new dataset or loader delivers the rest from a state, bit for bit."""
    dataset.load_state_dict(json.loads(state))
    assert same(list(dataset), rest)
