"""What a run will give, from its plan alone: no token is read.

::

    dataset --> the sequence of all ranks together --> packs --> Tally --> as loader.stats()
                                                  '--> steps, global batches, padding, repeats

The plan and the counts are those of a run itself, so the numbers are, too.

Cost: planning, some 0.4 us a sample. Lengths come from the length files; of a stream without one
each shard is opened for its offsets, and fetched where it is remote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.load import PackedStreamingDataset
from streampack.load.tally import Tally
from streampack.plan import DeviceView, EpochSequence, Recipe
from streampack.types import State

__all__ = ["simulate"]

AT_ONCE = 64  # batches that are planned at a time


def simulate(dataset: PackedStreamingDataset, *, steps: int | None = None) -> dict[str, Any]:
    """Plan epochs of a dataset from the next one's start, and return what all ranks would get.

    Args:
        dataset: What would be iterated; its world says by how many ranks, and any of them may ask.
            Its epochs count as begun.
        steps: Batches that each rank takes, over as many epochs as that needs; None: one epoch.

    Returns:
        `streams`, `packs`, `tokens`, `fill` and `substituted` as ``loader.stats()`` has them, those
        of all ranks added up, where a loader counts what it lost up to where it has read ahead; of
        each stream `repeats`, how often its samples were begun; `epochs` begun; `steps`; `ranks`
        that get batches of their own; `batch_size`; `global_batches` begun and
        `global_batch_size`; `padding_packs`, and `padding_tokens` with those in packs that are not
        full.

    Raises:
        ConfigError: If an epoch has no batch.
        DataError: If a stream's lengths cannot be had, or all of its samples are left out.
    """
    recipe, world = dataset.recipe, dataset.world
    # One device with the batches of all: the same packs in the same steps.
    view = DeviceView(batch_size=dataset.batch_size * world.num_devices)
    run = _Run(recipe, view)
    while run.num_epochs == 0 or (steps is not None and run.num_steps < steps):
        begun = dataset.begin()  # refuses what a training loop would spin on
        begun.close()
        run.plan(begun.epoch, None if steps is None else steps - run.num_steps)
    return run.numbers() | {"ranks": world.num_devices, "batch_size": dataset.batch_size}


class _Run:
    """What was planned so far, epoch after epoch."""

    def __init__(self, recipe: Recipe, view: DeviceView) -> None:
        self._recipe = recipe
        self._view = view
        self._tally = Tally(recipe)
        self._dropped = np.zeros(len(recipe.streams), np.int64)
        self._substituted = 0
        self._global_batches = 0
        self._snapshots: list[State] = []  # of lanes that roll on from epoch to epoch
        self.num_epochs = 0
        self.num_steps = 0

    def plan(self, epoch: int, most: int | None) -> None:
        """Plan an epoch, or so many steps of it at most."""
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
        """Return what was planned, as plain numbers."""
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
