"""Simulate a run from its plan alone, without reading tokens.

Planning and counting are the code of a real run, so the numbers are the same.

Cost: planning, about 0.4 us per sample. Lengths come from the length files. For a stream without
one, each shard is opened for its offsets, and fetched first if it is remote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from streampack.balance import Balance
from streampack.plan.deal import dealt_costs, step_time
from streampack.plan.device_plan import sharing_of
from streampack.plan.reader import END, MOST, PlanPart, PlanReader
from streampack.plan.state import Progress
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.planned.refusals import check_not_empty, check_tokenized, check_whole_batches
from streampack.report.chapters import describe_run
from streampack.report.nodes import NodeReads
from streampack.runtime.resumable import engine_of
from streampack.runtime.stats import DeliveryStats
from streampack.types import Int64Array

Watcher: TypeAlias = Callable[[PlanPart], None]
"""What follows a simulation. It is called with the batches of all devices in turn."""


def simulate(
    dataset: PackedStreamingDataset,
    *,
    steps: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Plan a dataset's next epochs, and return the totals over all ranks.

    Args:
        dataset: The dataset to simulate; its world gives the number of ranks. Any rank may call
            this. Its state, its next epoch and its statistics are not changed.
        steps: Batches per rank, over as many epochs as that needs, or None for one epoch.
        progress: Called with the number of batches planned so far, over all ranks, now and then.

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
            it has none (`is_dealt`). `note` tells if nothing can be gained.
        - `nodes`: A dict for each node. `shards`: Shards that its batches read; `shared_shards`:
          those of them that another node reads too. `read_bytes`: Their bytes, decompressed.
          `fetched_bytes`: Bytes that it fetches from remotes, each shard once. `cache_bytes`: Bytes
          that they take on its disk without a limit. `least_cache_limit`: The smallest
          ``Buffers(cache_limit)``, without workers. A loader also fetches up to a shuffle block
          ahead of the last batch.
        - `omitted_packs`: Packs that ``epoch_end="drop"`` omits.
        - `padding_packs`: Packs of padding, of one slot each.
        - `padding_tokens`: Padding, including that in packs that are not full.

        For a run of chapters without `steps`, the result is that of `describe_run`, however long
        the run is, with the passes through each stream. With `steps`, that many steps are planned,
        and the keys about epochs are missing.

    Raises:
        ConfigError: If an epoch has no batch, or texts would be tokenized to plan it.
        DataError: If a stream's lengths are unavailable, or all of its samples are dropped.
    """
    engine = engine_of(dataset)
    if engine.run.chapters and steps is None:
        return describe_run(dataset)
    num_batches = 0

    def count(part: PlanPart) -> None:
        nonlocal num_batches
        num_batches += part.plan.num_batches
        progress(num_batches)

    return simulate_with(engine, steps, [count]) | {
        "batch_size": dataset.batch_size,
        "digest": dataset.digest,
    }


def simulate_with(
    engine: PlanEngine, steps: int | None, watchers: Sequence[Watcher] = ()
) -> dict[str, Any]:
    """Simulate, and call `watchers` with each part; all but `batch_size` and `digest`."""
    check_tokenized(engine.spec.streams, "simulate")
    run, recipe, num_devices = engine.run, engine.recipe, engine.world.num_devices
    nodes, waits, delivery = NodeReads(engine), _Waits(engine), DeliveryStats(recipe)
    first = 0 if run.chapters else engine.next_epoch
    num_epochs = num_steps = global_batches = 0
    if not run.chapters:
        check_whole_batches(recipe)
    with PlanReader(run.whole(), Progress(epoch=first), skips=engine.state.skips) as reader:
        while num_epochs == 0 or (steps is not None and num_steps < steps and not run.chapters):
            reader.stop = END if run.chapters else (first + num_epochs + 1, 0)
            most = None if steps is None else (steps - num_steps) * num_devices
            num_batches = position = 0
            for part in _parts(reader, most):
                delivery.use(part.recipe)
                delivery.add(part.plan.packs, part.plan.slots_per_pack, part.shares)
                for watch in (nodes.add, waits.add, *watchers):
                    watch(part)
                num_batches, position = num_batches + part.plan.num_batches, part.plan.position
            if not (num_batches or run.chapters):
                check_not_empty(recipe, first + num_epochs)
            num_epochs += 1
            num_steps += -(-num_batches // num_devices)
            global_batches += -(-position // recipe.global_batch_size)
        totals = reader.totals
    stats = delivery.stats(totals.dropped.tolist())
    for row, stream in zip(stats["streams"].values(), recipe.streams, strict=True):
        row["repeats"] = row["samples"] / stream.num_samples
    stats |= {"substituted": totals.substituted, "steps": num_steps, "ranks": num_devices}
    stats |= {"straggler": waits.numbers(), "nodes": nodes.numbers()}
    if run.chapters:
        return stats | {"skipped": totals.skipped}
    slots = num_steps * engine.spec.view().stride
    return stats | {
        "omitted_packs": totals.omitted,
        "epochs": num_epochs,
        "global_batches": global_batches,
        "global_batch_size": recipe.global_batch_size,
        "padding_packs": slots - delivery.num_slots,
        "padding_tokens": slots * recipe.packing.row_tokens - stats["tokens"],
    }


def _parts(reader: PlanReader, most: int | None) -> Iterator[PlanPart]:
    """Yield the parts up to the reader's stop, of at most so many batches in all."""
    left = most
    while left is None or left > 0:
        part = reader.next(MOST if left is None else min(MOST, left))
        if part is None:
            return
        yield part
        left = None if left is None else left - part.plan.num_batches


class _Waits:
    """How long the ranks of a global batch wait for each other, by the cost of attention."""

    def __init__(self, engine: PlanEngine) -> None:
        self._world = world = engine.world
        self._balance = engine.spec.balance or Balance()
        self._is_dealt = engine.spec.balance is not None
        ranks = map(world.at, range(world.num_ranks))
        groups = {sharing_of(rank, self._balance) for rank in ranks}
        self._groups = [list(places) for places in sorted(groups)]
        self._span = -1
        # Costs of the packs of each batch of a global batch, in order.
        self._batches: list[Int64Array] = []
        self._num_steps = 0
        self._is_padded = self._keeps_batches = False
        self._times = np.zeros(2)
        self._num_batches = 0

    def add(self, part: PlanPart) -> None:
        """Count the batches of a part of the plan, which follow those of the part before."""
        plan, recipe = part.plan, part.recipe
        if self._span != plan.epoch:
            steps = recipe.global_batch_size / (plan.num_rows * plan.slots_per_pack)
            steps /= self._world.num_devices
            self._num_steps = int(steps) if steps.is_integer() else 0
            self._keeps_batches = recipe.mixing.batching_method == "device_per_stream"
            self._span, self._batches, self._is_padded = plan.epoch, [], False
        if not self._num_steps:
            return
        costs, size = self._balance.costs(plan.packs), plan.num_rows
        for number in range(plan.num_batches):
            own = costs[number * size : (number + 1) * size]
            self._batches.append(own.sum(keepdims=True) if self._keeps_batches else own)
            self._is_padded |= len(own) < size
            if len(self._batches) == self._num_steps * self._world.num_devices:
                self._finish()

    def _finish(self) -> None:
        """Count a global batch. The batch at index k belongs to the place k % devices."""
        batches, self._batches = self._batches, []
        is_padded, self._is_padded = self._is_padded, False
        if not is_padded:  # a padded last batch is not dealt
            costs = np.stack(batches).reshape(self._num_steps, self._world.num_devices, -1)
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
