"""Random runs over real files, with random streams, weights, lanes, packers, methods and worlds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streampack import (
    Balance,
    Chapter,
    Mixing,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Ramp,
    Stream,
    World,
)
from tests.helpers.conformance import Written, write_streams

METHODS = ["random", "stratified", "per_stream", "device_per_stream"]
PACKERS = [None, None, "next_fit", "concat", "knapsack"]


class Case:
    """A random run: how to make its dataset in any world."""

    def __init__(self, folder: Path, kind: str, number: int) -> None:
        self.dice = dice = random.Random(f"{kind} {number}")
        self.kind = kind
        # With "carry" and "drop", an epoch is at least one global batch.
        is_short = kind in ("carry", "drop")
        self.size = 4 if is_short else 24
        some = [40, 150] if is_short else [2, 9, 40, 150]
        sizes = [dice.choice(some) for _ in range(dice.randint(1, 3))]
        lengths = [[dice.randint(1, dice.choice([20, 60, 150])) for _ in range(n)] for n in sizes]
        self.written: Written = write_streams(folder / f"{kind}{number}", lengths)
        self.names = [f"s{number}" for number in range(len(sizes))]
        self.method = "random" if kind == "drop" else dice.choice(METHODS)
        self.max_seq_len = dice.choice([32, 64])
        # How often an epoch takes each sample, and the ways to configure that.
        self.times = [dice.choice([1, 1, 2, 3]) for _ in sizes]
        self.weights: list[dict[str, Any]] = [
            dice.choice([{"repeat": times}, {"choose": times * num}])
            for times, num in zip(self.times, sizes, strict=True)
        ]
        self.options = {
            "packing": Packing(max_seq_len=self.max_seq_len, method=dice.choice(PACKERS)),
            "order": Order(
                seed=number,
                num_lanes=1 if kind == "carry" else dice.choice([1, 2, 3]),
                shuffle_block_size=dice.choice([None, 16, 500]),
                pack_shuffle=dice.choice([None, None, 0, 32]),
            ),
            "batch_size": 2,
        }
        if self.method != "per_stream" and dice.random() < 0.3:
            self.options["balance"] = Balance()
        self.chapters = [self.chapter() for _ in range(dice.randint(1, 3))]

    def chapter(self) -> Chapter:
        used = self.dice.sample(self.names, self.dice.randint(1, len(self.names)))
        weights: dict[str, Any] = {name: self.dice.randint(1, 5) for name in used}
        if len(used) > 1 and self.dice.random() < 0.4:
            first, second = weights[used[0]], weights[used[1]]
            weights[used[0]], weights[used[1]] = Ramp(first, second), Ramp(second, first)
        longer = Packing(max_seq_len=96, method=self.options["packing"].method)
        return Chapter(
            weights=weights,
            steps=self.dice.randint(1, 6),
            packing=longer if self.dice.random() < 0.3 else None,
        )

    def dataset(
        self, world: World, chapters: list[Chapter] | None = None, skip: Any = ()
    ) -> PackedStreamingDataset:
        weights: Iterable[dict[str, Any]] = self.weights
        mixing = {"batching_method": self.method, "global_batch_size": self.size}
        options: dict[str, Any] = {"chapters": chapters or self.chapters, "skip": skip}
        if self.kind != "chapters":
            options = {}
            mixing["epoch_end"] = self.kind
        if self.kind == "chapters":
            weights = [{}] * len(self.names)
        streams = [
            Stream(name=name, local=str(path), **own)
            for name, path, own in zip(self.names, self.written.paths, weights, strict=True)
        ]
        return PackedStreamingDataset(
            streams, mixing=Mixing(**mixing), world=world, **self.options, **options
        )

    def loader(self, rank: int = 0, num_ranks: int = 1, **options: Any) -> PackedDataLoader:
        return PackedDataLoader(self.dataset(World(rank=rank, num_ranks=num_ranks), **options))
