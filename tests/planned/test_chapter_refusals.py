"""Refusals when resuming chapters, and their ways out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from streampack import (
    Chapter,
    ConfigError,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Ramp,
    ResumeError,
    Stream,
    World,
)
from tests.helpers.datasets import state_after

METHODS = ["random", "stratified", "device_per_stream", "per_stream"]
C = CHAPTERS = [
    Chapter(weights={"web": 3, "code": 1}, steps=6),
    Chapter(weights={"web": Ramp(3, 1), "math": Ramp(0, 2)}, steps=5),
    Chapter(weights={"math": 1, "code": 1}, steps=4),
]
FIXED, RAMP = 20, 60  # batches before a position in the first chapter, and in the second


@pytest.fixture
def make(make):
    return lambda chapters=CHAPTERS, **options: make(chapters, **options)


def keys(batches) -> list:
    return [(b["epoch"], b["position"], b["tokens"].numpy().tobytes()) for b in batches]


def saved(make, number: int, **options) -> Any:
    return state_after(PackedDataLoader(make(**options)), number)


def with_chapter(number: int, **changes: Any) -> dict[str, Any]:
    return {"chapters": [*C[:number], replace(C[number], **changes), *C[number + 1 :]]}


WEB, MORE = {"web": 1}, Chapter(weights={"math": 1}, steps=2)
RUNNING = (
    r"chapters\[0\] ran with {}; what ran cannot change: restore it, .*until and add a chapter"
)
PAST = (
    r"chapters\[{}\] ran with {}; what ran cannot change: restore it, and edit chapters after "
    r"chapters\[1\]$"
)
# Position of the state, an edit, the message, and ways out other than undoing the edit.
REFUSED: dict[str, tuple[int, dict[str, Any], str, list[dict[str, Any]]]] = {
    "other weights now": (
        FIXED,
        with_chapter(0, weights={"web": 1, "code": 1}),
        RUNNING.format(r"weights\['code'\]='1/4', but this run has '1/2'"),
        [{"chapters": [replace(C[0], steps=3), replace(C[0], weights={"web": 1, "code": 1})]}],
    ),
    "too short now": (
        FIXED,
        with_chapter(0, steps=2),
        r"chapters\[0\] has 2 steps, but 3 of them have begun; give it at least 3, or set until",
        [with_chapter(0, steps=3), with_chapter(0, steps=None, until=3 * 16 * 64)],
    ),
    "other weights before": (
        RAMP,
        with_chapter(0, weights={"web": 1, "code": 1}),
        PAST.format(0, r"weights\['code'\]='1/4', but this run has '1/2'"),
        [{"chapters": [*C[:2], MORE]}],
    ),
    "another ramp": (
        RAMP,
        with_chapter(1, weights={"web": Ramp(3, 0), "math": Ramp(0, 3)}),
        PAST.format(1, r"weights\['math'\]=\['0', '2/3'\], but this run has \['0', '1'\]"),
        [{"chapters": [*C[:2], MORE]}],
    ),
    "too few chapters": (
        RAMP,
        {"chapters": C[:1]},
        r"the state is in chapters\[1\], but this run has 1 chapters; keep those that the run "
        "began, and add others after them",
        [{"chapters": C[:2]}, {"chapters": [*C[:2], MORE]}],
    ),
    "a stream that ran is not there": (
        FIXED,
        {"names": ("web", "math"), "chapters": [replace(C[0], weights=WEB)]},
        RUNNING.format(r"weights\['code'\]='1/4', but this run has 'no share'"),
        [],
    ),
    "other data": (
        RAMP,
        {"data": {"code": "other"}},
        r"stream 'code' \(streams\[1\]\) has changed .*; resume with what the run began with",
        [],
    ),
    "another seed": (
        RAMP,
        {"order": {"seed": 18}},
        "saved with seed=17, but this dataset has seed=18; it is fixed for the whole run: resume",
        [],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", REFUSED)
def test_a_change_of_what_ran_is_refused_by_name_and_its_ways_out_work(make, case):
    number, edit, message, ways_out = REFUSED[case]
    state = saved(make, number)
    with pytest.raises(ResumeError, match=message):
        make(**edit).load_state_dict(state)
    for restored in ({}, *ways_out):
        loader = PackedDataLoader(make(**restored))
        loader.load_state_dict(state)
        rest = b"".join(tokens for _, _, tokens in keys(loader))
        written = {name: value for name, value in restored.items() if name == "chapters"}
        whole = b"".join(tokens for _, _, tokens in keys(PackedDataLoader(make(**written))))
        assert len(rest) > 0
        assert whole.endswith(rest)
        assert len(whole) - len(rest) == number * 2 * 64 * 8  # as many tokens came before


def test_a_chapter_whose_global_batches_are_no_whole_turns_of_all_lanes_is_refused(make):
    def begun(size: int):
        own = {"weights": {"web": 1}, "steps": 2}
        return make([Chapter(**own), Chapter(**own, global_batch_size=size)], method="per_stream")

    with pytest.raises(ConfigError, match=r"chapters\[1\]: .*num_lanes \* batch_size = 4"):
        begun(18)
    assert len(begun(20)) == 2 * 8 + 2 * 10


def test_a_stream_that_ran_stays_in_the_list_and_rests(make):
    # Its chapter is over, but a lane without a snapshot is replanned from the start of the run.
    state = saved(make, RAMP)
    with pytest.raises(
        ConfigError, match=r"chapters\[0\] gives a weight to 'code'.* add the stream"
    ):
        make(names=("web", "math"), chapters=C[:2])
    make(chapters=C[:2]).load_state_dict(state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    ["random", "stratified", *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[2:])],
)
def test_streams_in_another_order_are_refused_by_name(make, method):
    # The order of streams decides ties between them and, with "random", all draws. In another
    # order, samples would come twice.
    whole = keys(PackedDataLoader(make(method=method)))
    state = saved(make, 60, method=method)
    with pytest.raises(ResumeError, match=r"streams in another order: .*; pass them in") as caught:
        make(method=method, names=("math", "other", "web", "code")).load_state_dict(state)
    # The way out.
    names = tuple(re.findall(r"'(\w+)'", str(caught.value).partition(";")[0]))
    assert keys(PackedDataLoader(make(method=method, names=("other", *names)))) == whole
    for added in (names, ("other", *names), (*names[:1], "other", *names[1:]), (*names, "other")):
        loader = PackedDataLoader(make(method=method, names=added))
        loader.load_state_dict(state)
        assert keys(loader) == whole[60:]


def test_steps_are_skipped_only_where_a_world_reads_them_whole(make):
    # 19 batches of 2 packs end in the middle of a step of two ranks.
    state, two = saved(make, 19), World(num_ranks=2)
    with pytest.raises(
        ResumeError,
        match=r"position 38 is inside a step .* batch_size \* ranks = 4.*steps 4 to 4",
    ):
        make(skip=[(4, 4)], world=two).load_state_dict(state)
    for options in ({"skip": [(4, 4)], "world": two, "batch_size": 1}, {"world": two}):
        make(**options).load_state_dict(state)
    make(skip=[(7, 8)], world=two).load_state_dict(state)  # in the next chapter
    make(skip=[(0, 1)], world=two).load_state_dict(state)  # over
    whole = saved(make, 20)
    make(skip=[(4, 4)], world=two).load_state_dict(whole)
    loader = PackedDataLoader(make(world=two))
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="position 38 is inside a step"):
        loader.skip(1)


def test_a_state_without_chapters_is_refused_and_the_other_way_round(make, folders):
    def plain():
        return PackedStreamingDataset(
            [Stream(local=folders["web"])], packing=Packing(max_seq_len=64), world=World()
        )

    with pytest.raises(
        ResumeError, match=r"run without chapters, .* resume with the arguments that"
    ):
        make().load_state_dict(plain().state_dict())
    with pytest.raises(ResumeError, match=r"run of chapters, .*, and it has none"):
        plain().load_state_dict(saved(make, 3))
    # The ways out.
    plain().load_state_dict(plain().state_dict())
    make().load_state_dict(saved(make, 3))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("version"), "is not a state of a PackedStreamingDataset"),
        (lambda state: state.update(version=99), "version 99, this release reads"),
        (lambda state: state.update(epoch=7), "epoch"),
        (lambda state: state.update(chapters=[]), "chapters|epoch"),
        (lambda state: state.update(streams=["web", "web"]), "streams"),
        (lambda state: state.update(origins=[0]), "origins"),
        (lambda state: state.update(amended=[99]), "amended"),
        (lambda state: state["chapters"][0].update(steps="x"), "chapters is .* integers as steps"),
        (lambda state: state.update(skip=[[3, 1]]), "skip"),
        (lambda state: state["fingerprint"]["streams"].popitem(), r"streams\['\w+'\]=None"),
    ],
)
def test_a_damaged_state_is_refused_by_the_name_of_its_field(make, damage, message):
    state = saved(make, RAMP)
    whole = json.dumps(state)
    damage(state)
    dataset = make()
    with pytest.raises(ResumeError, match=message):
        dataset.load_state_dict(state)
    dataset.load_state_dict(json.loads(whole))  # the refusal changed nothing
