"""The worlds in states, and where each began, over resumes, chapters and amendments.

`streampack.planned.engine` records them; `streampack.plan.run_worlds` reads them.
"""

from __future__ import annotations

import pytest

from streampack import Chapter, PackedDataLoader, ResumeError, World
from streampack.plan.run_worlds import worlds_in
from tests.helpers.datasets import chapter_dataset, state_after, write_chapter_streams

CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=3),
    Chapter(weights={"web": 1, "math": 1}, steps=9, batch_size=4),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_chapter_streams(tmp_path_factory.mktemp("streams"))


def worlds_of(state):
    return [
        (each.epoch, each.position, each.num_ranks, each.batch_size) for each in worlds_in(state)
    ]


def test_a_state_records_each_world_of_the_run_and_where_it_began(folders):
    def loader(ranks, state=None):
        loader = PackedDataLoader(
            chapter_dataset(folders, CHAPTERS, world=World(num_ranks=ranks), global_batch_size=16)
        )
        if state is not None:
            loader.load_state_dict(state)
        return loader

    first = state_after(loader(2), 4)  # a step
    assert worlds_of(first) == [(0, 0, 2, 2)]
    second = state_after(loader(1, first), 8)
    assert worlds_of(second) == [(0, 0, 2, 2), (0, 16, 1, 2)]
    third = state_after(loader(4, second), 3)  # one in chapter 0, two in chapter 1
    assert worlds_of(third) == [
        *[(0, 0, 2, 2), (0, 16, 1, 2)],
        *[(0, 32, 4, 2), (1, 0, 4, 4)],
    ]
    # A run that goes back to an earlier state forgets the worlds after it.
    assert worlds_of(state_after(loader(1, first), 1)) == [(0, 0, 2, 2), (0, 16, 1, 2)]


def test_a_run_that_is_amended_keeps_its_worlds(folders):
    loader = PackedDataLoader(chapter_dataset(folders, CHAPTERS, world=World()))
    state_after(loader, 8)
    loader.amend(weights={"web": 1})
    assert worlds_of(state_after(loader, 1)) == [(0, 0, 1, 2)]


def test_a_state_without_worlds_loads_as_before_and_damaged_ones_are_refused(folders):
    dataset = chapter_dataset(folders, CHAPTERS, world=World())
    state = dataset.state_dict()
    dataset.load_state_dict({key: value for key, value in state.items() if key != "worlds"})
    assert worlds_of(dataset.state_dict()) == [(0, 0, 1, 2)]
    for worlds in ["", "[[1, 2]]", "[[0, 0, 1, 3, 1, 2, null, null]]", 7]:
        with pytest.raises(ResumeError, match="the state's worlds is"):
            dataset.load_state_dict(state | {"worlds": worlds})
