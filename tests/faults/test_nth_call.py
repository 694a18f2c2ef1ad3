"""No matter which call to the disk or the store fails: correct bytes or a typed error, then a clean
resume.

A small epoch is simulated once for each call: the n-th one fails, returns too little, or is the
last thing the process does. Then the job starts again without faults from its last saved state; the
simulation compares every batch with that of the unbroken run.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.helpers.faults.setups import Setup, make_setups
from tests.helpers.faults.simulation import Faults, Simulation


@pytest.fixture(scope="module")
def setups(tmp_path_factory) -> list[Setup]:
    return make_setups(tmp_path_factory.mktemp("setups"))


def count_starts(setup: Setup, faults: Faults, first: int = 1, step: int = 1) -> tuple[int, int]:
    """Make uses go wrong, each alone; return how many there are, and how many ended the job."""
    num_ended = 0
    for at in count(first, step):
        simulation = Simulation([setup], 1, faults=replace(faults, at=at))
        simulation.run()
        if not simulation.was_hit:
            assert simulation.num_jobs == 1
            return at - 1, num_ended
        num_ended += simulation.num_jobs > 1


# Raw shards with length files, and compressed ones that are kept, without.
@pytest.mark.parametrize(
    ("kind", "number", "first", "step"),
    [
        # Each use fails once: the odd ones as an error, the others as the end of the process.
        ("EIO", 0, 1, 2),
        ("kill", 0, 2, 2),
        ("short", 0, 1, 1),
        *(
            pytest.param(kind, number, 1, 1, marks=pytest.mark.slow)
            for kind in ("EIO", "ENOSPC", "short", "kill")
            for number in (0, 3)
        ),
    ],
)
def test_whichever_use_of_the_disk_goes_wrong_the_run_goes_on_exactly(
    setups, number, kind, first, step
):
    faults = Faults(victim=0, kind=kind)
    num_uses, num_ended = count_starts(setups[number], faults, first, step)
    assert (num_uses if kind == "short" else num_ended) > 5


@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ENOSPC", "short", "refused", "kill"])
def test_whichever_object_of_the_store_goes_wrong_the_run_goes_on_exactly(setups, number, kind):
    _, num_ended = count_starts(setups[number], Faults(victim=0, kind=kind, of_store=True))
    assert num_ended == 0 if kind == "short" else num_ended >= 3
