"""The packers in plain Python: slow, obvious, and written from the description, not the kernels.

::

    rows (lists of six ints) --exact_fit / next_fit--> packs (lists of rows), rows left over

Reachable sums are the bits of one int; nothing is shared with the package but the numbers that
it documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations

import numpy as np

Row = list[int]  # stream, pass, sample, start, length, total
SAMPLE, START, LENGTH, TOTAL = 2, 3, 4, 5


def rows_of(lengths: list[int] | np.ndarray) -> np.ndarray:
    """Return rows of whole samples, numbered as they come, shape (n, 6)."""
    rows = np.zeros((len(lengths), 6), np.int64)
    rows[:, SAMPLE] = np.arange(len(lengths))
    rows[:, LENGTH:] = np.array(lengths, np.int64)[:, None]
    return rows


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A packing, in the numbers that its description names."""

    max_seq_len: int
    buffer_tokens: int
    buffer_samples: int
    split_gap: float | None = None

    @property
    def window(self) -> int:
        return min(self.max_seq_len, 8192)

    @property
    def tolerance(self) -> int:
        return self.max_seq_len // 1000

    @property
    def min_fragment(self) -> int:
        return min(64, max(1, self.max_seq_len // 8))

    def may_cut(self, gap: int) -> bool:
        return self.split_gap is not None and gap > Fraction(str(self.split_gap)) * self.max_seq_len


class OutOfRowsError(Exception):
    """A pack wants one row more than there is."""


@dataclass
class Run:
    """A packer at work on rows that are all known."""

    rules: Rules
    rows: list[Row]
    final: bool
    pool: list[Row] = field(default_factory=list)
    packs: list[list[Row]] = field(default_factory=list)
    high_tokens: int = 0
    high_samples: int = 0

    def pull(self) -> bool:
        """Put the next row into the pool; False where the bounds, or the end, forbid it."""
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
        self.high_tokens = max(self.high_tokens, tokens)
        self.high_samples = max(self.high_samples, len(self.pool))
        return True

    def seen(self, place: int) -> bool:
        """Tell whether the pool has this place, if need be with one more row."""
        return place < len(self.pool) or self.pull()


def cut(rules: Rules, row: Row, gap: int) -> tuple[list[Row], Row]:
    """Return the head of a row that fills the gap (or none), and what is left of the row."""
    head = min(gap, row[LENGTH] - rules.min_fragment)
    if not rules.may_cut(gap) or row[LENGTH] <= gap or head < rules.min_fragment:
        return [], row
    rest = [*row[:START], row[START] + head, row[LENGTH] - head, row[TOTAL]]
    return [[*row[:LENGTH], head, row[TOTAL]]], rest


def subset(run: Run, first: int, left: int) -> set[int]:
    """Return the places, from `first` on, whose lengths fill `left` best: the oldest that do."""
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


def one_exact_pack(run: Run) -> None:
    """Close one pack; nothing but the pool changes before it is complete."""
    rules = run.rules
    if not run.seen(0):
        return
    left = rules.max_seq_len - run.pool[0][LENGTH]
    first = 1
    while left > rules.window and run.seen(first):
        if left - run.pool[first][LENGTH] < rules.window:
            break
        left -= run.pool[first][LENGTH]
        first += 1
    chosen = set(range(first)) | subset(run, first, left)
    pack = [run.pool[place] for place in sorted(chosen)]
    run.pool = [row for place, row in enumerate(run.pool) if place not in chosen]
    if run.pool:
        gap = rules.max_seq_len - sum(row[LENGTH] for row in pack)
        head, run.pool[0] = cut(rules, run.pool[0], gap)
        pack += head
    run.packs.append(pack)


def exact_fit(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    """Pack rows by exact fit, until they are all taken or, with `final`, all packed."""
    run = Run(rules=rules, rows=[list(row) for row in rows], final=final)
    try:
        while run.rows or run.pool:
            one_exact_pack(run)
    except OutOfRowsError:
        pass
    return run


def next_fit(rules: Rules, rows: list[Row], *, final: bool) -> Run:
    """Pack rows by next fit."""
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
        if free == 0 or len(run.pool) == rules.buffer_samples:
            run.packs.append(run.pool)
            run.pool, free = [], rules.max_seq_len
    if final and run.pool:
        run.packs.append(run.pool)
        run.pool = []
    return run


def largest_sum(lengths: list[int], limit: int) -> int:
    """Return the largest sum of some of the lengths that is within the limit, by trying all."""
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
