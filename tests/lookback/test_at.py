"""`at` plans from a state that comes before the step, and shows a run as it was amended."""

from __future__ import annotations

import pytest

from streampack import Chapter, PackedDataLoader, Ramp, World, at
from tests.helpers.datasets import chapter_dataset, state_after, write_chapter_streams

CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=12),
    Chapter(weights={"web": Ramp(1, 0.5), "math": Ramp(1, 1.5)}, steps=10),
    Chapter(weights={"web": 1, "code": 1}, steps=10),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_chapter_streams(tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize("method", ["random", "device_per_stream"])
def test_a_step_is_planned_from_a_state_before_it_and_else_from_the_start(folders, method):
    def planned(dataset, step):
        reached = []
        rows = at(dataset, step, report=reached.append).rows
        return reached[0], [(row.ranks, row.segments.tolist()) for row in rows]

    def dataset():
        return chapter_dataset(folders, CHAPTERS, method=method)

    wanted = {step: planned(dataset(), step)[1] for step in (2, 14, 15, 16, 31)}
    # Eight batches are a step: the states stand in step 15, in chapter 1, and before it.
    for num_batches, first in ((15 * 8 + 3, 16), (15 * 8, 15)):
        loaded = dataset()
        loaded.load_state_dict(state_after(PackedDataLoader(dataset()), num_batches))
        for step in (31, first, first - 1, 2):
            start = 15 if step >= first else 0
            assert planned(loaded, step) == (start, wanted[step])


def test_an_amended_run_is_looked_back_at_as_it_ran(folders):
    loader = PackedDataLoader(chapter_dataset(folders, CHAPTERS, world=World()))
    seen = []
    for batch in loader:
        seen.append(batch["segments"].tolist())
        if len(seen) == 40:
            loader.amend(weights={"math": 1})
        if len(seen) == 64:
            break
    dataset = chapter_dataset(folders, CHAPTERS, world=World())
    dataset.load_state_dict(loader.state_dict())
    # The dataset of the loop plans from where it was amended, the other one from the start.
    for own, step in [(own, step) for own in (dataset, loader.dataset) for step in (3, 5, 6, 7)]:
        batches = seen[8 * step : 8 * step + 8]  # of a step
        shown = [
            [row.row, *segment[:5]]
            for number in range(8)
            for row in at(own, step).rows
            if row.batch == number
            for segment in row.segments.tolist()
        ]
        assert shown == [segment for batch in batches for segment in batch]
