"""The spans of a run with epochs: each epoch has the same recipe.

::

    pad, drop    epoch 0 [ drains ] | epoch 1 [ drains ]      a walk and queues for each
    carry        epoch 0 [ counted  |  epoch 1   counted ]    one walk, one set of queues

A sequence goes through spans. `RunPlan` has those of a run of chapters, in the same words.

Cost: with carry, a walk over the epochs before; see `SlotWalker.go_to_epoch`.
"""

from __future__ import annotations

from collections.abc import Callable

from streampack.plan.recipe import Recipe
from streampack.plan.slots import SlotWalker, WalkState


class Epochs:
    """The epochs of a run, as spans."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._is_carry = recipe.mixing.epoch_end == "carry"

    def index(self, number: int) -> int:  # noqa: ARG002 - as in RunPlan
        """Return the place of a span's view and recipe: all epochs have the same."""
        return 0

    def recipe_of(self, number: int) -> Recipe:  # noqa: ARG002 - as in RunPlan
        """Return the recipe of an epoch."""
        return self._recipe

    def first(self, number: int) -> int:
        """Return the epoch at which the queues of an epoch begin."""
        return 0 if self._is_carry else number

    def num_slots(self, number: int) -> int | None:  # noqa: ARG002 - as in RunPlan
        """Return the packs of an epoch that is counted; None: it drains."""
        return self._recipe.packs_per_carry_epoch if self._is_carry else None

    def lane_offset(self, number: int) -> int:
        """Return the slots that the lanes have served when an epoch begins."""
        return (number - self.first(number)) * self._recipe.packs_per_carry_epoch

    def walker(
        self,
        number: int,
        position: int,  # noqa: ARG002 - as in RunPlan
        extend_queue: Callable[[int, int], None],
        walk: WalkState | None = None,  # noqa: ARG002 - as in RunPlan
    ) -> SlotWalker:
        """Return the walk at the start of an epoch."""
        walker = SlotWalker(self._recipe, self.first(number), extend_queue)
        if self._is_carry:
            walker.go_to_epoch(number)
        return walker
