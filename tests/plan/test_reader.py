"""A reader gives the packs of every view at their places, epoch after epoch, up to a stop."""

from __future__ import annotations

import numpy as np
import pytest

from streampack.config import Mixing
from streampack.plan.device_plan import DeviceView
from streampack.plan.reader import PlanReader, lanes_of, num_parts
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress
from tests.helpers.planning import recipe

GLOBAL = 8


def run_of(epoch_end: str, num_lanes: int = 4) -> RunPlan:
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    mixing = Mixing(epoch_end=epoch_end)
    sizes = {"num_lanes": num_lanes, "global_batch_size": GLOBAL}
    return RunPlan([recipe([lengths], mixing=mixing, **sizes)])


def read(run, stop, start=None):
    """Return a device's packs by epoch and slot."""
    found = {}
    with PlanReader(run, start, stop=stop) as reader:
        for part in reader:
            assert len(part.slots) == len(part.plan.packs)
            for pack in map(part.pack, range(len(part.slots))):
                found[part.plan.epoch, pack.slot] = pack.segments.tolist()
    return found


@pytest.mark.parametrize("epoch_end", ["pad", "drop", "carry"])
def test_the_views_of_all_devices_have_the_packs_of_one_that_gets_all(epoch_end):
    run, stop = run_of(epoch_end), (2, 3 * GLOBAL)
    whole = read(run.seen([DeviceView(batch_size=2)]), stop)

    views = [DeviceView(place=place, num_devices=2, batch_size=2) for place in range(2)]
    parts = [read(run.seen([view]), stop) for view in views]

    assert {epoch for epoch, _ in whole} == {0, 1, 2}
    assert max(whole) == (2, 3 * GLOBAL - 1)
    assert parts[0] | parts[1] == whole
    assert not parts[0].keys() & parts[1].keys()
    if epoch_end == "carry":
        assert num_parts(run) == 4
        lanes = [read(lanes_of(run, part, 4), stop) for part in range(4)]
        assert {place: pack for own in lanes for place, pack in own.items()} == whole
    else:
        assert num_parts(run) == 1


@pytest.mark.parametrize("epoch_end", ["pad", "carry"])
def test_reading_to_a_stop_and_on_is_reading_at_once(epoch_end):
    run, last = run_of(epoch_end), (2, 2 * GLOBAL)
    whole, found = read(run.seen([DeviceView(batch_size=2)]), last), {}
    with PlanReader(run.seen([DeviceView(batch_size=2)]), stop=(0, 6)) as reader:
        for stop in [(0, 6), (1, 0), last]:
            reader.stop = stop
            for part in reader:
                for pack in map(part.pack, range(len(part.slots))):
                    assert (part.plan.epoch, pack.slot) < stop
                    found[part.plan.epoch, pack.slot] = pack.segments.tolist()
        totals = reader.totals
    assert found == whole
    with PlanReader(run.seen([DeviceView(batch_size=2)]), stop=last) as reader:
        assert sum(len(part.slots) for part in reader) == len(whole)
        assert reader.totals.dropped.tolist() == totals.dropped.tolist()


def test_reading_ends_before_the_stop_also_behind_skipped_steps():
    run = run_of("carry")
    with PlanReader(run.seen([DeviceView(batch_size=2)]), skips=[(1, 3)], stop=(0, 34)) as reader:
        steps = [slot // GLOBAL for part in reader for slot in part.slots.tolist()]
        assert reader.totals.skipped == 2
    assert steps == [0] * GLOBAL + [3] * GLOBAL + [4, 4]
    start = Progress(position=10)
    assert min(read(run.seen([DeviceView(batch_size=2)]), (0, 34), start)) == (0, 10)
