"""The packers in plain Python: slow, obvious, and written from the docs rather than the kernels.

::

    rows (lists of six ints) --exact_fit / next_fit / ...--> packs (lists of rows), rows left over

A set of reachable sums is stored as the bits of an int. The only things shared with the package are
the constants that it documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
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
    split_gap: float | None = None
    fragment: int | None = None
    guard: int | None = None
    max_samples: int | None = None
    open_packs: int = 8
    multiple: int = 1

    @property
    def search_tokens(self) -> int:
        return min(self.max_seq_len, 8192)

    @property
    def tolerance(self) -> int:
        return self.max_seq_len // 1000

    @property
    def min_fragment(self) -> int:
        wanted = self.fragment or min(64, max(1, self.max_seq_len // 8))
        return wanted + self.multiple - 1  # a piece also needs room for its padding

    @property
    def most(self) -> int:
        return self.max_samples or 10**9

    def may_cut(self, gap: int) -> bool:
        return self.split_gap is not None and gap > Fraction(str(self.split_gap)) * self.max_seq_len


class OutOfRowsError(Exception):
    """A pack needs one more row than there is."""


@dataclass
class Run:
    rules: Rules
    rows: list[Row]
    final: bool
    pool: list[Row] = field(default_factory=list)
    packs: list[list[Row]] = field(default_factory=list)
    born: list[int] = field(
        default_factory=list
    )  # for each row in the pool, the pool packs closed when it arrived
    num_closed: int = 0
    high_tokens: int = 0
    high_samples: int = 0

    def pull(self) -> bool:
        """Move the next row into the pool; return False if it is full or no row is left."""
        while self.rows and self.rows[0][LENGTH] == self.rules.max_seq_len:
            self.packs.append([self.rows.pop(0)])
        if not self.rows:
            if self.final:
                return False
            raise OutOfRowsError
        tokens = sum(row[LENGTH] for row in [*self.pool, self.rows[0]])
        if len(self.pool) == self.rules.buffer_samples or tokens > self.rules.buffer_tokens:
            return False
        self.pool.append(self.rows.pop(0))
        self.born.append(self.num_closed)
        self.high_tokens = max(self.high_tokens, tokens)
        self.high_samples = max(self.high_samples, len(self.pool))
        return True

    def seen(self, place: int) -> bool:
        return place < len(self.pool) or self.pull()


def cut(rules: Rules, row: Row, gap: int) -> tuple[list[Row], Row]:
    """Split a row into the head that fills the gap, if there is one, and the rest."""
    head = min(gap, row[LENGTH] - rules.min_fragment)
    head -= head % rules.multiple
    if not rules.may_cut(gap) or row[LENGTH] <= gap or head < rules.min_fragment:
        return [], row
    rest = [*row[:START], row[START] + head, row[LENGTH] - head, row[TOTAL]]
    return [[*row[:LENGTH], head, row[TOTAL]]], rest


def subset(run: Run, first: int, left: int) -> set[int]:
    """Return the places, from `first` on, that fill `left` best; on a tie, the oldest ones."""
    reach, snaps, place, patience = 1, [], first, 16
    while not reach >> left & 1 and patience and run.seen(place):
        length = run.pool[place][LENGTH]
        snaps.append((place, length, reach))
        if length <= left:
            reach = (reach | reach << length) & ((1 << left + 1) - 1)
        if reach.bit_length() - 1 >= left - run.rules.tolerance:
            patience -= 1
        place += 1
    best, chosen = reach.bit_length() - 1, set()
    for place, length, before in reversed(snaps):
        if not before >> best & 1:
            chosen.add(place)
            best -= length
    return chosen


def fewest(run: Run, first: int, left: int) -> set[int]:
    """Like `subset`, but limited to the number of samples that a pack can still take."""
    budget, never = run.rules.most - first, 10**9
    counts, snaps, place, patience = {0: 0}, [], first, 16
    if not budget:
        return set()
    while patience and counts.get(left, never) > budget and len(snaps) < 256 and run.seen(place):
        length = run.pool[place][LENGTH]
        if length <= left:
            snaps.append((place, length, counts))
            longer = {
                total + length: n + 1 for total, n in counts.items() if total + length <= left
            }
            counts = {
                total: min(counts.get(total, never), longer.get(total, never))
                for total in counts.keys() | longer.keys()
            }
        if any(n <= budget and left - t <= run.rules.tolerance for t, n in counts.items()):
            patience -= 1
        place += 1
    best, chosen = max(total for total, n in counts.items() if n <= budget), set()
    for place, length, before in reversed(snaps):
        if before.get(best, never) > budget:
            chosen.add(place)
            best -= length
            budget -= 1
    return chosen


def one_exact_pack(run: Run) -> None:
    """Close one pack; only the pool changes before the pack is complete."""
    rules = run.rules
    if not run.seen(0):
        return
    left = rules.max_seq_len - run.pool[0][LENGTH]
    first = 1
    while rules.guard and first < min(len(run.pool), rules.most):
        if run.num_closed - run.born[first] < rules.guard or run.pool[first][LENGTH] > left:
            break
        left -= run.pool[first][LENGTH]
        first += 1
    while left > rules.search_tokens and first < rules.most and run.seen(first):
        if left - run.pool[first][LENGTH] < rules.search_tokens:
            break
        left -= run.pool[first][LENGTH]
        first += 1
    found = subset(run, first, left)
    if first + len(found) > rules.most:
        found = fewest(run, first, left)
    chosen = set(range(first)) | found
    pack = [run.pool[place] for place in sorted(chosen)]
    run.born = [born for place, born in enumerate(run.born) if place not in chosen]
    run.pool = [row for place, row in enumerate(run.pool) if place not in chosen]
    run.num_closed += 1
    if run.pool and len(pack) < rules.most:
        gap = rules.max_seq_len - sum(row[LENGTH] for row in pack)
        head, run.pool[0] = cut(rules, run.pool[0], gap)
        pack += head
    run.packs.append(pack)


def exact_fit(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    run = Run(rules=rules, rows=[list(row) for row in rows], final=final)
    try:
        while run.rows or run.pool:
            one_exact_pack(run)
    except OutOfRowsError:
        pass
    return run


def next_fit(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    run = Run(rules=rules, rows=[], final=final)
    free = rules.max_seq_len
    for row in rows:
        piece = list(row)
        if piece[LENGTH] > free:
            head, piece = cut(rules, piece, free)
            run.packs.append(run.pool + head)
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


def knapsack(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    run = Run(rules=rules, rows=[], final=final)

    def empty() -> None:
        lengths = [row[LENGTH] for row in run.pool]
        bins = greedy_knapsack(lengths, rules.max_seq_len, rules.most)
        run.packs += [[run.pool[item] for item in sorted(found)] for found in sorted(bins)]
        run.pool = []

    for row in rows:
        tokens = sum(held[LENGTH] for held in run.pool) + row[LENGTH]
        if tokens > rules.buffer_tokens or len(run.pool) == rules.buffer_samples:
            empty()
        run.pool.append(list(row))
        run.high_tokens = max(run.high_tokens, sum(held[LENGTH] for held in run.pool))
        run.high_samples = max(run.high_samples, len(run.pool))
    if final and run.pool:
        empty()
    return run


def best_fit_decreasing(
    rules: Rules, rows: list[Row], *, final: bool, waited: Sequence[int] = ()
) -> Run:
    run = Run(rules=rules, rows=[], final=final)
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
    run = Run(rules=rules, rows=[], final=final)
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


def largest_sum(lengths: list[int], limit: int) -> int:
    """Return the largest sum of lengths within the limit, by trying all subsets."""
    sums = (sum(some) for count in range(len(lengths) + 1) for some in combinations(lengths, count))
    return max(total for total in sums if total <= limit)


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
