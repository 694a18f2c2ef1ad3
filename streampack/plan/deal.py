"""Deal the packs of a global batch to steps and ranks by their cost.

::

    costs     9 8 4 3 2 1      sorted
    bins      [9] [8] [4] [3] [2] [1]      num_steps * num_ranks device batches, by greedy LPT
    steps     [9   8   4] [3   2   1]      neighbours in cost share a step

Longest processing time first (Graham 1969): each pack, from the most expensive, joins the cheapest
device batch that is not full. Device batches are then sorted, so that those of one step cost nearly
the same. See docs/adr/0027.

Cost: about 20 ns a pack and device batch, in integers; the same result in every process.
"""

from __future__ import annotations

import numpy as np

from streampack._numba import compiled
from streampack.balance import Balance
from streampack.plan.device_plan import BatchPacks, DeviceView
from streampack.plan.pack_order import take_packs
from streampack.plan.recipe import Recipe
from streampack.types import Int64Array


@compiled
def _fill_bins(
    costs: Int64Array, order: Int64Array, bins: Int64Array, counts: Int64Array, loads: Int64Array
) -> None:
    """Put items into `bins`, shape (num_bins, size), in `order`; sum up their counts and costs."""
    num_bins, size = bins.shape
    for item in order:
        best = -1
        # The cheapest bin that is not full; on a tie the first.
        for candidate in range(num_bins):
            if counts[candidate] < size and (best < 0 or loads[candidate] < loads[best]):
                best = candidate
        bins[best, counts[best]] = item
        counts[best] += 1
        loads[best] += costs[item]


def deal_by_cost(costs: Int64Array, num_steps: int, num_ranks: int) -> Int64Array:
    """Return which item goes to which step and rank: indices, shape (num_steps, num_ranks, n).

    `costs` of all items have shape (num_steps * num_ranks * n,).

    >>> deal_by_cost(np.array([9, 1, 2, 4, 8, 3]), 2, 3).tolist()
    [[[0], [4], [3]], [[5], [2], [1]]]
    """
    num_bins = num_steps * num_ranks
    size = len(costs) // num_bins
    # Stable, so that packs of equal cost are dealt alike in every process.
    order = np.argsort(-costs, kind="stable")
    # Sorted packs are the best deal already: neighbours in cost share a step.
    if size == 1:
        return order.reshape(num_steps, num_ranks, 1)
    bins = np.empty((num_bins, size), np.int64)
    counts, loads = np.zeros((2, num_bins), np.int64)
    _fill_bins(costs, order, bins, counts, loads)
    return bins[np.argsort(-loads, kind="stable")].reshape(num_steps, num_ranks, size)


def step_time(costs: Int64Array) -> float:
    """Return the time of a global batch over the ideal one: the straggler factor.

    `costs` of device batches have shape (num_steps, num_ranks).

    >>> step_time(np.array([[9, 1, 2], [4, 8, 3]])), step_time(np.array([[9, 8, 4], [3, 2, 1]]))
    (1.8888888888888888, 1.3333333333333333)
    """
    # A step lasts as long as its slowest rank; ideally, all of its ranks take their mean.
    return float(costs.max(axis=1).sum() * costs.shape[1] / max(int(costs.sum()), 1))


def dealt_costs(
    costs: Int64Array, groups: list[list[int]], *, keeps_batches: bool = False
) -> Int64Array:
    """Return the cost of each device batch once packs are dealt, shape (num_steps, num_ranks).

    `costs` of packs have shape (num_steps, num_ranks, n). Each of `groups` are ranks that
    share packs; together all ranks. With `keeps_batches`, whole device batches are dealt.

    >>> dealt_costs(np.array([[[9], [1]], [[4], [8]]]), [[0, 1]]).tolist()
    [[9, 8], [4, 1]]
    """
    num_steps = len(costs)
    out = np.empty(costs.shape[:2], np.int64)
    for ranks in groups:
        # Shape (num_steps, ranks of the group, n).
        own = costs[:, ranks]
        items = own.sum(axis=2).ravel() if keeps_batches else own.ravel()
        out[:, ranks] = items[deal_by_cost(items, num_steps, len(ranks))].sum(axis=2)
    return out


class Dealer:
    """Deals the packs of global batches by their cost, and keeps what one device gets."""

    def __init__(self, recipe: Recipe, view: DeviceView, balance: Balance) -> None:
        self._view = view
        self._balance = balance
        self._num_steps = recipe.global_batch_size // view.stride
        self._keeps_batches = recipe.mixing.batching_method == "device_per_stream"
        self._times = np.zeros(2)
        self._num_dealt = 0

    @property
    def straggler(self) -> tuple[float, float] | None:
        """Mean time of a global batch over the ideal, as planned and as dealt, or None."""
        if not self._num_dealt:
            return None
        planned, dealt = (self._times / self._num_dealt).tolist()
        return planned, dealt

    def slots(self, first: int) -> Int64Array:
        """Return the slots of all devices that share packs, in order, in the global batch."""
        begins = np.array(sorted(view.first_slot(first) for view in self._view.shared))
        steps = self._view.stride * np.arange(self._num_steps)
        # Axes: step, device, row of the device batch.
        return self._view.slots_from(steps[:, None] + begins).ravel()

    def deal(self, batches: BatchPacks) -> BatchPacks:
        """Return this device's batches of a global batch, given those of all devices at `slots`."""
        num_ranks = len(self._view.sharing)
        costs, shapes = self._balance.costs(batches.packs), batches.slots_per_pack
        if self._keeps_batches:
            costs = np.add.reduceat(costs, batches.bounds[:-1])
        dealt = deal_by_cost(costs, self._num_steps, num_ranks)
        planned = costs.reshape(self._num_steps, num_ranks, -1).sum(axis=2)
        self._times += [step_time(planned), step_time(costs[dealt].sum(axis=2))]
        self._num_dealt += 1
        # Axes of `dealt`: step, rank, item.
        own = dealt[:, self._view.sharing.index(self._view.place)].ravel()
        if self._keeps_batches:
            bounds, shapes = batches.bounds, shapes[own]
            own = np.concatenate([np.arange(*bounds[batch : batch + 2]) for batch in own.tolist()])
        else:
            shapes = shapes[: self._num_steps]  # all batches have packs of one length
        return BatchPacks(take_packs(batches.packs, own), shapes, self._view)
