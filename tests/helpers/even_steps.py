"""Loops of `steps` on ranks with different amounts of data: the actual and the expected batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from streampack import (
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    Packing,
    World,
)
from tests.helpers.batches import digest

STEPS_OF_RANKS = (41, 38, 36, 45)


class Unsized:
    """Repeatable items without a length; each worker of a rank gets its own part."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def own(self) -> list[list[int]]:
        info = get_worker_info()
        return self.rows[info.id :: info.num_workers] if info else self.rows

    def __iter__(self) -> Any:
        return iter(self.own())


def rows_of_packs(rank: int, num_packs: int) -> list[list[int]]:
    """Samples that each fill a pack of 8 tokens."""
    return [[1000 * rank + number] * 8 for number in range(num_packs)]


def dataset_of(
    rank: int, num_ranks: int, num_packs: int, *, again: type = Unsized, **options: Any
) -> PackedIterableDataset:
    mixing = options.pop("mixing", None)
    return PackedIterableDataset(
        [IterableStream(again(rows_of_packs(rank, num_packs)), sharded=True, name="own")],
        packing=Packing(max_seq_len=8),
        mixing=mixing,
        world=World(rank=rank, num_ranks=num_ranks),
        **options,
    )


def mixture(steps: Any, method: str = "random", **mixing: Any) -> PackedIterableDataset:
    """One rank with two lists of samples of various lengths, several of which fit in a pack."""
    lengths = [7, 12, 30, 2, 9, 11, 70, 3, 5, 21] * 3
    sources = [
        [[1000 * number + index] * length for index, length in enumerate(lengths)]
        for number in range(2)
    ]
    return PackedIterableDataset(
        [
            IterableStream(source, proportion=number + 1, name=f"s{number}")
            for number, source in enumerate(sources)
        ],
        packing=Packing(max_seq_len=32),
        mixing=Mixing(batching_method=method, **mixing),
        order=Order(seed=3),
        batch_size=2,
        steps=steps,
    )


def loops(loader: Any, number: int) -> list[list[str]]:
    return [[digest(batch) for batch in loader] for _ in range(number)]


def in_order(parts: list[list[str]]) -> list[str]:
    return [digest for part in parts for digest in part]


def equal_lengths(lengths: list[list[int]], num_loops: int) -> list[int]:
    """Steps of each loop with steps="equal", by the definition."""
    taken = 0
    found = []
    for loop in range(num_loops):
        end = min(sum(own[: loop + 1]) for own in lengths)
        found.append(end - taken)
        taken = end
    return found


def loader_of(dataset: PackedIterableDataset, workers: int, **options: Any) -> PackedDataLoader:
    if workers:
        options["multiprocessing_context"] = "fork"
    return PackedDataLoader(dataset, num_workers=workers, **options)
