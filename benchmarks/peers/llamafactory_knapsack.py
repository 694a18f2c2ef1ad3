"""A reimplementation of LLaMA-Factory's greedy knapsack: bisect for the largest sample that fits.

Like the original under `datasets.map`, it packs a thousand samples at a time, drops those longer
than a pack, and concatenates lists to make its rows.

Cost: about 0.3 µs per sample to plan, and 80 ns per token to pack.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from functools import partial

from peers.task import Case, Measured, Task, samples

PACKAGES = ()
TOGETHER = 1000


def knapsack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return the places in `lengths` that share a pack, for each pack."""
    places = sorted(range(len(lengths)), key=lengths.__getitem__)
    sizes = [lengths[place] for place in places]
    packs = []
    while sizes:
        pack, left = [], capacity
        while fitting := bisect_right(sizes, left):
            left -= sizes.pop(fitting - 1)
            pack.append(places.pop(fitting - 1))
        packs.append(pack)
    return packs


def _row(pack: list[int], lists: list[list[int]], capacity: int) -> dict[str, list[int]]:
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "mask": []}
    for number, place in enumerate(pack, 1):
        tokens = lists[place]
        row["input_ids"] += tokens
        row["labels"] += tokens
        row["position_ids"] += list(range(len(tokens)))
        row["mask"] += [number] * len(tokens)
    empty = capacity - len(row["input_ids"])
    for key, padding in (("input_ids", 0), ("labels", -100), ("position_ids", 0), ("mask", 0)):
        row[key] += [padding] * empty
    return row


def pack(task: Task, rows: bool) -> Measured:
    """Plan, and where asked make rows of lists."""
    lists = [array.tolist() for array in samples(task) if len(array) <= task.max_seq_len]
    num_packs = 0
    begin = time.perf_counter()
    for first in range(0, len(lists), TOGETHER):
        some = lists[first : first + TOGETHER]
        packs = knapsack([len(tokens) for tokens in some], task.max_seq_len)
        num_packs += len(packs)
        if rows:
            for chosen in packs:
                _row(chosen, some, task.max_seq_len)
    seconds = time.perf_counter() - begin
    tokens = sum(map(len, lists))
    return Measured(tokens=tokens, seconds=seconds, slots=num_packs * task.max_seq_len)


CASES = {
    "knapsack": Case(kind="plan", work=partial(pack, rows=False)),
    "knapsack and rows": Case(kind="pack", work=partial(pack, rows=True)),
}
