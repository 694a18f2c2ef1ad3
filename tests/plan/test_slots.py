"""A walk over the slots of a chapter continues from the states that it notes on its way."""

from __future__ import annotations

import pytest

from streampack.chapters import Chapter
from streampack.plan.slots import SlotWalker
from streampack.plan.spans import start_of_run
from tests.helpers.chapters import LENGTHS, run_plan


@pytest.mark.parametrize(("method", "num_lanes"), [("stratified", 3), ("device_per_stream", 1)])
def test_a_chapters_walk_continues_from_a_late_state_as_if_it_had_not_stopped(method, num_lanes):
    chapters = [Chapter(weights={"web": 3, "code": 1}, steps=12_500)]
    [recipe] = run_plan(
        LENGTHS, chapters, method=method, num_lanes=num_lanes, global_batch_size=24
    ).recipes
    walker = SlotWalker(recipe, 0, start=start_of_run(recipe))
    slots = walker.next(300_000)

    assert walker.slot == len(slots) == 300_000
    assert walker.states[-1].slot > 190_000
    for state in walker.states:
        resumed = SlotWalker(recipe, 0, start=state)
        assert (resumed.next(2000) == slots[state.slot : state.slot + 2000]).all()
