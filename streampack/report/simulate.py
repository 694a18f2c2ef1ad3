"""Simulate a run from its plan alone, without reading tokens.

::

    dataset --> the sequence of all ranks together --> packs --> DeliveryStats --> loader.stats()
                                                  '--> steps, global batches, padding, repeats

Planning and counting are the code of a real run, so the numbers are the same.

Cost: planning, about 0.4 us per sample. Lengths come from the length files. For a stream without
one, each shard is opened for its offsets, and fetched first if it is remote.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from streampack.balance import Balance
from streampack.plan import DevicePlan, DeviceView, EpochSequence, Recipe
from streampack.plan.deal import dealt_costs, step_time
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.device_view import device_view
from streampack.planned.refusals import check_not_empty
from streampack.runtime.resumable import engine_of
from streampack.runtime.stats import DeliveryStats
from streampack.types import Int64Array, State

PLAN_BATCHES = 64  # batches planned per call


def simulate(dataset: PackedStreamingDataset, *, steps: int | None = None) -> dict[str, Any]:
    """Plan a dataset's next epochs, and return the totals over all ranks.

    Args:
        dataset: The dataset to simulate; its world gives the number of ranks. Any rank may call
            this. It stays as it is: its state, its next epoch and its statistics.
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
        - `straggler`: How long ranks wait for each other, or None if no global batch is a whole
            number of steps. Time of a global batch over the ideal one: `planned` without balance,
            `dealt` with it, by the cost model of the dataset's `balance`, or of ``Balance()`` if
            it has none (`is_dealt`). `note` says where nothing can be gained.
        - `padding_packs`: Packs of padding.
        - `padding_tokens`: Padding, including that in packs that are not full.

    Raises:
        ConfigError: If an epoch has no batch.
        DataError: If a stream's lengths are unavailable, or all of its samples are dropped.
    """
    engine, world = engine_of(dataset), dataset.world
    # A single device with all ranks' batches gets the same packs in the same steps.
    view = DeviceView(batch_size=dataset.batch_size * world.num_devices)
    run, epoch = _Run(engine.recipe, view, _Waits(engine.recipe, dataset)), engine.next_epoch
    while run.num_epochs == 0 or (steps is not None and run.num_steps < steps):
        run.plan(epoch, None if steps is None else steps - run.num_steps)
        epoch += 1
    return run.numbers() | {
        "ranks": world.num_devices,
        "batch_size": dataset.batch_size,
        "digest": dataset.digest,
    }


class _Waits:
    """How long the ranks of a global batch wait for each other, by the cost of attention.

    Args:
        recipe: Determines the sequence.
        dataset: Has the world, the batch size and the balance.
    """

    def __init__(self, recipe: Recipe, dataset: PackedStreamingDataset) -> None:
        world, size = dataset.world, recipe.global_batch_size
        self._window = dataset.batch_size * world.num_devices
        self._batch_size = dataset.batch_size
        self._num_devices = world.num_devices
        self._num_steps = size // self._window if size % self._window == 0 else 0
        self._balance = engine_of(dataset).balance or Balance()
        self._is_dealt = engine_of(dataset).balance is not None
        self._keeps_batches = recipe.mixing.batching_method == "device_per_stream"
        ranks = [replace(world, rank=rank) for rank in range(world.num_ranks)]
        views = (device_view(rank, dataset.batch_size, self._balance) for rank in ranks)
        self._groups = [list(places) for places in sorted({view.sharing for view in views})]
        self._steps: list[Int64Array] = []  # costs of the packs of a global batch, by place
        self._times = np.zeros(2)
        self._num_batches = 0

    def add(self, plan: DevicePlan) -> None:
        """Count the steps of a plan of all ranks."""
        for number, position in enumerate(plan.positions if self._num_steps else []):
            packs = plan.part(number, number + 1).packs
            if len(packs) < self._window:  # a padded last batch is not dealt
                self._steps = []
                continue
            # The batch at index k of a step goes to the place (k + first batch) % devices.
            first = (position - self._window) // self._batch_size
            costs = self._balance.costs(packs).reshape(self._num_devices, self._batch_size)
            self._steps.append(np.roll(costs, first % self._num_devices, axis=0))
            if position % (self._num_steps * self._window) == 0:
                self._finish()

    def _finish(self) -> None:
        steps, self._steps = self._steps, []
        if len(steps) == self._num_steps:
            costs = np.stack(steps)
            dealt = dealt_costs(costs, self._groups, keeps_batches=self._keeps_batches)
            self._times += [step_time(costs.sum(axis=2)), step_time(dealt)]
            self._num_batches += 1

    def numbers(self) -> dict[str, Any] | None:
        """Return the mean times over the ideal; None without a whole global batch."""
        if not self._num_batches:
            return None
        planned, dealt = (self._times / self._num_batches).tolist()
        num_items = self._num_steps * len(self._groups[0])
        note = None
        if num_items == 1:
            note = "each group of ranks has one batch in a global batch: nothing can be gained"
        return {"planned": planned, "dealt": dealt, "is_dealt": self._is_dealt, "note": note}


class _Run:
    """The totals of the epochs planned so far."""

    def __init__(self, recipe: Recipe, view: DeviceView, waits: _Waits) -> None:
        self._recipe = recipe
        self._view = view
        self._waits = waits
        self._delivery = DeliveryStats(recipe)
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
            plan = sequence.next(
                PLAN_BATCHES if most is None else min(PLAN_BATCHES, most - num_steps)
            )
            if plan is None:
                if not num_steps:
                    check_not_empty(self._recipe, epoch)
                break
            self._delivery.add(plan.packs)
            self._waits.add(plan)
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
        stats = self._delivery.stats(self._dropped.tolist())
        rows = zip(stats["streams"].values(), self._recipe.streams, strict=True)
        for row, stream in rows:
            row["repeats"] = row["samples"] / stream.num_samples
        slots = self.num_steps * self._view.window
        return stats | {
            "substituted": self._substituted,
            "straggler": self._waits.numbers(),
            "epochs": self.num_epochs,
            "steps": self.num_steps,
            "global_batches": self._global_batches,
            "global_batch_size": self._recipe.global_batch_size,
            "padding_packs": slots - stats["packs"],
            "padding_tokens": slots * self._recipe.packing.max_seq_len - stats["tokens"],
        }
