"""No matter which call to the disk or the store fails: correct bytes or a typed error, then a clean
resume.

A small epoch is simulated once for each call: the n-th one fails, returns too little, or is the
last thing the process does. Then the job starts again without faults from its last saved state; the
simulation compares every batch with that of the unbroken run. About 15 s in total.
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


def count_starts(setup: Setup, faults: Faults) -> tuple[int, int]:
    """Make each use go wrong in turn; return how many there are, and how many ended the job."""
    num_ended = 0
    for at in count(1):
        simulation = Simulation([setup], 1, faults=replace(faults, at=at))
        simulation.run()
        if not simulation.was_hit:
            assert simulation.num_jobs == 1
            return at - 1, num_ended
        num_ended += simulation.num_jobs > 1


# Raw shards with length files, and compressed ones that are kept, without.
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *((kind, 0) for kind in ("EIO", "short", "kill")),
        pytest.param("ENOSPC", 0, marks=pytest.mark.slow),
        *(
            pytest.param(each, 3, marks=pytest.mark.slow)
            for each in ("EIO", "ENOSPC", "short", "kill")
        ),
    ],
)
def test_whichever_use_of_the_disk_goes_wrong_the_run_goes_on_exactly(setups, number, kind):
    num_uses, num_ended = count_starts(setups[number], Faults(victim=0, kind=kind))
    assert (num_uses if kind == "short" else num_ended) > 5


@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ENOSPC", "short", "refused", "kill"])
def test_whichever_object_of_the_store_goes_wrong_the_run_goes_on_exactly(setups, number, kind):
    _, num_ended = count_starts(setups[number], Faults(victim=0, kind=kind, of_store=True))
    assert num_ended == 0 if kind == "short" else num_ended >= 3
