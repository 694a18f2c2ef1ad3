"""The first step at which two runs differ is the first with other packs."""

from __future__ import annotations

import pytest

from streampack import Chapter, ConfigError, Ramp, World, at
from streampack.lookback import difference
from tests.helpers.datasets import chapter_dataset, write_chapter_streams

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=12),
    Chapter(weights={"web": Ramp(1, 0.5), "math": Ramp(1, 1.5)}, steps=10),
    Chapter(weights={"web": 1, "code": 1}, steps=10),
]
EDITED = [*CHAPTERS[:1], Chapter(weights={"math": 1}, steps=14), CHAPTERS[2]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_chapter_streams(tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_differ_from_the_first_step_with_other_packs(folders, method):
    def dataset(chapters):
        return chapter_dataset(folders, chapters, method=method, world=World(num_ranks=2))

    def shown(run, step):
        return [(row.ranks, row.segments.tolist()) for row in at(run, step).rows]

    runs = dataset(CHAPTERS), dataset(EDITED)
    differ = [step for step in range(8, 16) if shown(runs[0], step) != shown(runs[1], step)]
    assert differ[0] >= 12
    assert difference(dataset(CHAPTERS), dataset(EDITED))[0] == differ[0]
    assert difference(dataset(CHAPTERS), dataset(CHAPTERS)) is None
    assert difference(dataset(CHAPTERS), dataset(EDITED), upto=11) is None


def test_two_runs_without_an_end_are_compared_up_to_a_step(folders):
    last = [Chapter(weights={"web": 1})]
    edge = [Chapter(weights={"web": 1}, steps=5)]  # changes no pack
    runs = [chapter_dataset(folders, chapters) for chapters in (last, edge + last)]
    with pytest.raises(ConfigError, match="such as upto=100000"):
        difference(*runs)
    assert difference(*runs, upto=20) is None
