"""The packers in plain Python: slow, obvious, and written from the docs rather than the kernels.

::

    rows (lists of six ints) --next_fit / concat / ...--> packs (lists of rows), rows left over

The only things shared with the package are the constants that it documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = list[int]  # stream, pass, sample, start, length, total
SAMPLE, START, LENGTH, TOTAL = 2, 3, 4, 5


def rows_of(lengths: list[int] | np.ndarray) -> np.ndarray:
    """Return rows of whole samples, numbered in order, shape (n, 6)."""
    rows = np.zeros((len(lengths), 6), np.int64)
    rows[:, SAMPLE] = np.arange(len(lengths))
    rows[:, LENGTH:] = np.array(lengths, np.int64)[:, None]
    return rows


@dataclass(frozen=True, kw_only=True)
class Rules:
    max_seq_len: int
    buffer_tokens: int
    buffer_samples: int
    max_samples: int | None = None
    multiple: int = 1

    @property
    def tolerance(self) -> int:
        return self.max_seq_len // 1000

    @property
    def most(self) -> int:
        return self.max_samples or 10**9


@dataclass
class Run:
    pool: list[Row] = field(default_factory=list)
    packs: list[list[Row]] = field(default_factory=list)
    high_tokens: int = 0
    high_samples: int = 0


def next_fit(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    run = Run()
    free = rules.max_seq_len
    for row in rows:
        piece = list(row)
        if piece[LENGTH] > free:
            run.packs.append(run.pool)
            run.pool, free = [], rules.max_seq_len
        run.pool.append(piece)
        free -= piece[LENGTH]
        run.high_tokens = max(run.high_tokens, rules.max_seq_len - free)
        run.high_samples = max(run.high_samples, len(run.pool))
        if free == 0 or len(run.pool) == min(rules.buffer_samples, rules.most):
            run.packs.append(run.pool)
            run.pool, free = [], rules.max_seq_len
    if final and run.pool:
        run.packs.append(run.pool)
        run.pool = []
    return run


def greedy_knapsack(lengths: list[int], capacity: int, most: int = 10**9) -> list[list[int]]:
    """Return bins of item numbers, taking the longest item that fits; on a tie, the oldest."""
    left, bins = list(range(len(lengths))), []
    while left:
        bins.append([])
        room = capacity
        while len(bins[-1]) < most:
            able = [item for item in left if lengths[item] <= room]
            if not able:
                break
            item = max(able, key=lambda item: (lengths[item], -item))
            left.remove(item)
            bins[-1].append(item)
            room -= lengths[item]
    return bins


def knapsack(rules: Rules, rows: list[Row], **_: Any) -> Run:
    bins = greedy_knapsack([row[LENGTH] for row in rows], rules.max_seq_len, rules.most)
    return Run(packs=[[rows[item] for item in sorted(found)] for found in sorted(bins)])


def best_fit_decreasing(
    rules: Rules, rows: list[Row], *, final: bool, waited: Sequence[int] = ()
) -> Run:
    run = Run()
    size = rules.max_seq_len
    bins: list[list[int]] = []  # places in `rows`; the first one opened the bin
    touched: list[int] = []  # when each bin last received a row

    def free(number: int) -> int:
        return size - sum(rows[place][LENGTH] for place in bins[number])

    by_length = sorted(
        range(len(rows)), key=lambda place: (place >= len(waited), -rows[place][LENGTH])
    )
    for turn, place in enumerate(by_length):
        fitting = [
            number
            for number in range(len(bins))
            if free(number) >= rows[place][LENGTH] and len(bins[number]) < rules.most
        ]
        if fitting:
            best = min(fitting, key=lambda number: (free(number), -touched[number]))
        else:
            best = len(bins)
            bins.append([])
            touched.append(turn)
        bins[best].append(place)
        touched[best] = turn
    held: list[int] = []
    tokens = samples = 0
    for number in sorted(range(len(bins)), key=lambda number: -free(number)):
        is_full = free(number) <= rules.tolerance or len(bins[number]) == rules.most
        is_old = any(waited[place] for place in bins[number] if place < len(waited))
        if final or is_full or is_old:
            continue
        tokens += size - free(number)
        samples += len(bins[number])
        if tokens <= rules.buffer_tokens and samples <= rules.buffer_samples:
            held += bins[number]
    run.pool = [rows[place] for place in sorted(held)]
    run.packs = [
        [rows[place] for place in sorted(own)]
        for own in sorted(bins, key=lambda own: own[0])
        if own[0] not in held
    ]
    return run


def concat(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    run = Run()
    for row in rows:
        begin = row[START]
        for token in range(row[START], row[START] + row[LENGTH], rules.multiple):
            if token == begin:
                run.pool.append([*row[:START], token, 0, row[TOTAL]])
                run.high_samples = max(run.high_samples, len(run.pool))
            run.pool[-1][LENGTH] += rules.multiple
            held = sum(piece[LENGTH] for piece in run.pool)
            run.high_tokens = max(run.high_tokens, held)
            is_last = token + rules.multiple == row[START] + row[LENGTH]
            is_full = held == rules.max_seq_len
            if is_full or (is_last and len(run.pool) == rules.buffer_samples):
                run.packs.append(run.pool)
                run.pool, begin = [], token + rules.multiple
    if final and run.pool:
        run.packs.append(run.pool)
        run.pool = []
    return run


def in_rooms(oracle: Any, rules: Rules, rows: list[Row], *, final: bool) -> Run:
    """Run an oracle on the padded lengths of rows, and return packs of the original rows."""
    rooms = [
        [*row[:LENGTH], -(-row[LENGTH] // rules.multiple) * rules.multiple, row[TOTAL]]
        for row in rows
    ]
    run = oracle(rules, rooms, final=final)
    for row in [row for rows in [run.pool, *run.packs] for row in rows]:
        row[LENGTH] = min(row[LENGTH], row[TOTAL] - row[START])
    return run


def fit_samples(samples: list[list[int]], max_seq_len: int, overflow: str) -> list[Row]:
    """Turn samples (stream, pass, sample, tokens) into rows, one at a time."""
    rows = []
    for *place, tokens in samples:
        if tokens > max_seq_len and overflow == "drop":
            continue
        total = min(tokens, max_seq_len) if overflow == "truncate" else tokens
        for start in range(0, total, max_seq_len):
            rows.append([*place, start, min(max_seq_len, total - start), total])
    return rows
