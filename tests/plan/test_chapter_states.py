"""States of runs of chapters survive a round trip, and damaged parts are dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streampack.chapters import Chapter
from streampack.config import Packing
from streampack.errors import ResumeError
from streampack.plan.pack_queue import PackQueue
from streampack.plan.sequence import PackSequence
from streampack.plan.snapshots import rows_as_text
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, decode_state, encode_state
from streampack.types import LENGTH, SAMPLE, TOTAL
from tests.helpers.chapters import run_plan, views_of

NAMES = ["web", "code"]
RUN = [Chapter(weights={"web": 2, "code": 1}, steps=8), Chapter(weights={"web": 1}, steps=2)]
ROW = [0, 0, 5, 0, 20, 30]  # stream, pass, sample, start, length, total


def make(
    method: str = "random", more: str | None = None, steps: int = 8, **options: Any
) -> RunPlan:
    """A run, with another stream listed first if `more` is set."""
    names = NAMES if more is None else [more, *NAMES]
    lengths = {name: np.random.default_rng(len(name)).integers(1, 90, 300) for name in names}
    shape = {"num_lanes": 2, "lane_turn": 2, "global_batch_size": 8}
    run = [replace(RUN[0], steps=steps), RUN[1]]
    return run_plan(lengths, run, method=method, **shape, **options)


def state_of(plan: RunPlan) -> dict[str, Any]:
    """The state after 20 packs."""
    [views] = views_of([2] * len(RUN), 1)
    sequence = PackSequence(plan.seen(views))
    while sequence.position < 20:
        sequence.next()
    progress = Progress(epoch=0, position=20, snapshots=sequence.snapshots())
    return json.loads(json.dumps(encode_state(plan, NAMES, progress)))


def test_a_damaged_snapshot_is_dropped_also_where_streams_were_added(caplog):
    state = state_of(make())
    snapshots = json.loads(state["snapshots"])
    snapshots[0]["undelivered"] = rows_as_text(np.array([ROW]))

    for more in (None, "math"):
        progress = decode_state(
            state | {"snapshots": snapshots}, make(more=more), [*filter(None, [more]), *NAMES]
        )
        assert len(progress.snapshots) == len(snapshots) - 1
    assert "1 of the state's snapshots are damaged" in caplog.text


def test_a_running_chapter_may_end_where_the_run_stands_and_not_before():
    state = state_of(make()) | {"position": 24}
    assert decode_state(state, make(steps=3), NAMES).position == 24
    with pytest.raises(ResumeError, match=r"has 2 steps, but 3 of them have begun; .* at least 3"):
        decode_state(state, make(steps=2), NAMES)


def test_a_chapter_that_sets_the_default_of_an_option_is_the_same():
    packing = Packing(max_seq_len=64, buffer_tokens=65_536)
    for before, after in ((make(), make(packing=packing)), (make(packing=packing), make())):
        assert decode_state(state_of(before), after, NAMES).position == 20


def test_undelivered_segments_may_be_longer_than_the_packs_of_the_chapter():
    state = state_of(make())
    snapshots = json.loads(state["snapshots"])
    snapshots[0]["undelivered"] = rows_as_text(np.array([[0, 0, 5, 0, 65, 70]]))
    pack_queue = PackQueue(make().recipes[0], 0, 0)
    pack_queue.restore(snapshots[0])
    pack_queue.extend()
    rows = np.concatenate([pack_queue.segments, pack_queue.windows.packer.buffered]).tolist()
    pieces = [row for row in rows if row[SAMPLE] == 5 and row[TOTAL] == 70]
    assert sorted(row[LENGTH] for row in pieces) == [1, 64]


def test_other_totals_of_a_chapters_streams_are_refused_where_packs_depend_on_them():
    plan = make()
    state = state_of(plan)
    assert decode_state(state, make(), NAMES).position == 20
    other = make()
    other.recipes[:] = [
        replace(recipe, streams=tuple(replace(own, num_tokens=999) for own in recipe.streams))
        for recipe in plan.recipes
    ]
    with pytest.raises(ResumeError, match=r"chapters\[0\] ran with tokens.*lengths= and index="):
        decode_state(state, other, NAMES)
