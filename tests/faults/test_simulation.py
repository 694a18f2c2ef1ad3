"""No matter what happens to a training job, its epoch is exact: 300 seeded schedules.

What the checker must see, it sees within 60. A failure names the seed that reproduces it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.faults import simulation
from tests.helpers.faults.setups import Setup, make_setups
from tests.helpers.faults.simulation import BrokenPromiseError, simulate

NUM_SCHEDULES = 300
NUM_PARTS, NUM_QUICK = 10, 2


@pytest.fixture(scope="module")
def setups(tmp_path_factory) -> list[Setup]:
    return make_setups(tmp_path_factory.mktemp("setups"))


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[pytest.mark.slow] if part >= NUM_QUICK else [])
        for part in range(NUM_PARTS)
    ],
)
def test_a_job_that_is_delayed_damaged_and_killed_ends_with_an_exact_epoch(setups, part):
    size = NUM_SCHEDULES // NUM_PARTS
    num_jobs = sum(simulate(setups, seed) for seed in range(part * size, (part + 1) * size))
    assert num_jobs > size * 1.3  # otherwise hardly any job was killed and resumed


@pytest.mark.slow
def test_so_do_twenty_thousand_others(setups):
    for seed in range(NUM_SCHEDULES, NUM_SCHEDULES + 20_000):
        simulate(setups, seed)


def test_a_schedule_is_the_same_whenever_it_is_played(setups):
    stories: list[list[str]] = [[], []]
    for story in stories:
        simulate(setups, 17, story.append)
    names = [[line.partition(".tmp")[0][:60] for line in story] for story in stories]
    assert names[0] == names[1]
    assert len(names[0]) > 5


# ---------------------------------------------------------------------------- the checker sees


def play(setups: list[Setup], num_seeds: int) -> None:
    for seed in range(num_seeds):
        simulate(setups, seed)


def finds(setups: list[Setup], text: str) -> None:
    """Play schedules until one breaks a guarantee in this way."""
    with pytest.raises(BrokenPromiseError, match=text):
        play(setups, 60)


def test_it_would_see_a_sample_altered(setups, monkeypatch):
    gather = simulation.Gatherer.gather

    def gather_other(self, packs, num_rows):
        rows = gather(self, packs, num_rows)
        rows.tokens[-1, 0] += len(packs) and packs.segments[0, 2] == 3
        return rows

    monkeypatch.setattr(simulation.Gatherer, "gather", gather_other)
    finds(setups, "is not that of the unbroken run")


def test_it_would_see_a_resume_that_skips(setups, monkeypatch):
    decode = simulation.decode_epochs

    def decode_other(*args):
        progress = decode(*args)
        return replace(progress, position=progress.position + 2, snapshots=[])

    monkeypatch.setattr(simulation, "decode_epochs", decode_other)
    finds(setups, "times|has other bytes|unbroken run|not a multiple")


def test_it_would_see_damage_that_nobody_notices(setups, monkeypatch):
    monkeypatch.setattr("streampack.storage.verify.FileVerifier.problem", lambda *_: None)
    finds(setups, "was not noticed|raised without a fault|unbroken run|other bytes")
