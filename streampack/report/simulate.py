"""Simulate a run from its plan alone, without reading tokens.

::

    dataset --> the sequence of all ranks together --> packs --> DeliveryStats --> loader.stats()
                                                  '--> steps, global batches, padding, repeats

Planning and counting are the code of a real run, so the numbers are the same.

Cost: planning, about 0.4 us per sample. Lengths come from the length files. For a stream without
one, each shard is opened for its offsets, and fetched first if it is remote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.plan import DeviceView, EpochSequence, Recipe
from streampack.planned.dataset import PackedStreamingDataset
from streampack.runtime.stats import DeliveryStats
from streampack.types import State

AT_ONCE = 64  # batches planned per call


def simulate(dataset: PackedStreamingDataset, *, steps: int | None = None) -> dict[str, Any]:
    """Plan a dataset's next epochs, and return the totals over all ranks.

    Args:
        dataset: The dataset to simulate; its world gives the number of ranks. Any rank may call
            this. The simulated epochs count as begun.
        steps: Batches per rank, over as many epochs as that needs; None: one epoch.

    Returns:
        `streams`, `packs`, `tokens`, `fill` and `substituted` as in ``loader.stats()``, summed over
        all ranks. A loader's own counts of lost samples run ahead by what it has prefetched. Each
        stream also has `repeats`, the number of times its samples were begun. The other keys:

        - `epochs`: Epochs begun.
        - `steps`: Batches per rank.
        - `ranks`: Ranks that get distinct batches.
        - `batch_size`, `digest`: As in the dataset.
        - `global_batches`, `global_batch_size`: Global batches begun, and their packs.
        - `padding_packs`: Packs of padding.
        - `padding_tokens`: Padding, including that in packs that are not full.

    Raises:
        ConfigError: If an epoch has no batch.
        DataError: If a stream's lengths are unavailable, or all of its samples are dropped.
    """
    recipe, world = dataset.recipe, dataset.world
    # A single device with all ranks' batches gets the same packs in the same steps.
    view = DeviceView(batch_size=dataset.batch_size * world.num_devices)
    run = _Run(recipe, view)
    while run.num_epochs == 0 or (steps is not None and run.num_steps < steps):
        begun = dataset.begin()  # refuses an epoch without a batch, which would loop forever
        begun.close()
        run.plan(begun.epoch, None if steps is None else steps - run.num_steps)
    return run.numbers() | {
        "ranks": world.num_devices,
        "batch_size": dataset.batch_size,
        "digest": dataset.digest,
    }


class _Run:
    """The totals of the epochs planned so far."""

    def __init__(self, recipe: Recipe, view: DeviceView) -> None:
        self._recipe = recipe
        self._view = view
        self._tally = DeliveryStats(recipe)
        self._dropped = np.zeros(len(recipe.streams), np.int64)
        self._substituted = 0
        self._global_batches = 0
        self._snapshots: list[State] = []  # of lanes that carry over from epoch to epoch
        self.num_epochs = 0
        self.num_steps = 0

    def plan(self, epoch: int, most: int | None) -> None:
        """Plan an epoch, or at most `most` steps of it."""
        sequence = EpochSequence(self._recipe, self._view, epoch=epoch, snapshots=self._snapshots)
        before = sequence.overlong
        num_steps = position = 0
        while most is None or num_steps < most:
            plan = sequence.next(AT_ONCE if most is None else min(AT_ONCE, most - num_steps))
            if plan is None:
                break
            self._tally.add(plan.packs)
            num_steps += plan.num_batches
            position = plan.position
        if self._recipe.packing.overflow == "drop":
            self._dropped += sequence.overlong - before
        self._substituted += sequence.substituted
        self._global_batches += -(-position // self._recipe.global_batch_size)
        if self._recipe.mixing.epoch_end == "carry":
            self._snapshots = sequence.snapshots()
        sequence.close()
        self.num_steps += num_steps
        self.num_epochs += 1

    def numbers(self) -> dict[str, Any]:
        """Return the totals as plain numbers."""
        stats = self._tally.stats(self._dropped.tolist())
        rows = zip(stats["streams"].values(), self._recipe.streams, strict=True)
        for row, stream in rows:
            row["repeats"] = row["samples"] / stream.num_samples
        slots = self.num_steps * self._view.window
        return stats | {
            "substituted": self._substituted,
            "epochs": self.num_epochs,
            "steps": self.num_steps,
            "global_batches": self._global_batches,
            "global_batch_size": self._recipe.global_batch_size,
            "padding_packs": slots - stats["packs"],
            "padding_tokens": slots * self._recipe.packing.max_seq_len - stats["tokens"],
        }
