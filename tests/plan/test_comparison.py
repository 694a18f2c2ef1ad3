"""The first field in which two runs differ, and what a refusal says of it."""

from __future__ import annotations

import pytest

from streampack.errors import ResumeError
from streampack.plan.comparison import check_same, differences, flat, run_values

NAMES = ["web", "code"]
EPOCHS = {
    "streams": ["5f:1", "91"],
    "weights": [[60, "samples"], [30, "samples"]],
    "seed": 3,
    "pack_shuffle": [512, 8192],
    "tokens": None,
}
CHAPTER = {"weights": {"code": ["1/4", "1/4"], "web": ["3/4", "1/2"]}, "steps": 9, "lane_run": 2}
CHAPTERS = {"streams": {"web": "5f:1", "code": "91"}, "seed": 3}


def epochs(**changes):
    return run_values(EPOCHS | changes, NAMES)


def chapters(*, seed=3, streams=CHAPTERS["streams"], **changes):
    records = [CHAPTER, CHAPTER | changes]
    return run_values({"streams": streams, "seed": seed}, NAMES, records)


def test_streams_come_first_then_amounts_then_options_in_order():
    other = epochs(streams=["6a", "91"], weights=[[60, "samples"], [7, "samples"]], seed=4)
    assert [found.path for found in differences(epochs(), other)] == [
        ("streams", "web"),
        ("weights", "code"),
        ("seed",),
    ]


def test_what_holds_for_all_chapters_comes_first_and_a_length_is_the_last_of_its_chapter():
    other = chapters(seed=4, streams={"web": "5f:1", "code": "7"}, steps=4, lane_run=1)
    assert [found.path for found in differences(chapters(), other)] == [
        ("seed",),
        ("chapters", 0, "streams", "code"),
        ("chapters", 1, "lane_run"),
        ("chapters", 1, "streams", "code"),
        ("chapters", 1, "steps"),
    ]


def test_none_is_as_if_it_were_missing():
    assert list(differences(flat({"a": None, "b": {}}), flat({}))) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"streams": ["6a:1", "91"]},
            r"stream 'web' \(streams\[0\]\) has changed .* other data.*resume with",
        ),
        (
            {"streams": ["5f:2", "91"]},
            r"stream 'web' \(streams\[0\]\) has changed .* with other lengths",
        ),
        ({"weights": [[60, "samples"], [7, "samples"]]}, r"weights\['code'\]=\[30.*epoch_size"),
        ({"pack_shuffle": [4, 64]}, r"resume with Order\(pack_shuffle=512\), or start again"),
        ({"tokens": [1, 2]}, "tokens=None.*restore the length files, and lengths= and index="),
        ({"max_seq_len_of_streams": [8]}, "the max_seq_len of each Stream"),
        ({"num_lanes": 4}, "a run keeps its num_lanes: set None"),
        ({"seed": 4}, "seed=3, but this dataset has seed=4; it is fixed for the whole run"),
        ({"chapters": [{"a": 1}]}, r"this dataset has|this run has"),
    ],
)
def test_a_run_of_epochs_is_refused_by_its_first_difference(other, message):
    with pytest.raises(ResumeError, match=message):
        check_same(epochs(), epochs(**other), NAMES)


@pytest.mark.parametrize(
    ("running", "ramp_steps", "message"),
    [
        (1, None, None),
        (1, 9, r"chapters\[1\] ran with steps=9, but this run has 4; .* after chapters\[1\]$"),
        (2, None, r"chapters\[1\] ran with steps=9, but this run has 4; .* after chapters\[2\]$"),
    ],
)
def test_only_a_running_chapter_without_a_ramp_may_change_its_length(running, ramp_steps, message):
    saved, own = (chapters(steps=steps, ramp_steps=ramp_steps) for steps in (9, 4))
    if message is None:
        check_same(saved, own, NAMES, running=running)
        return
    with pytest.raises(ResumeError, match=message):
        check_same(saved, own, NAMES, running=running)


def test_whole_passes_of_a_chapter_that_runs_are_not_ended_by_another_chapter():
    saved, own = (flat({"chapters": {0: {"passes": number, "steps": 4}}}) for number in (2, 3))
    with pytest.raises(ResumeError, match=r"passes=2, .* after chapters\[0\]$"):
        check_same(saved, own, running=0)
