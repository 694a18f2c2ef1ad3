"""States of runs of chapters from damaged files: what compiled code would use is checked before."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streampack.chapters import Chapter
from streampack.errors import ResumeError
from streampack.plan.pack_queue import PackQueue
from streampack.plan.run_plan import RunPlan
from streampack.plan.run_state import decode_run_state, encode_run_state
from streampack.plan.sequence import PackSequence
from streampack.plan.slot_kernels import CHOSEN, HOLDS, LEFT, SERVING, TURN
from streampack.plan.state import Progress
from streampack.plan.state_text import rows_as_text, text_as_walk, walk_as_text
from streampack.types import LENGTH, SAMPLE, TOTAL
from tests.helpers.chapters import run_plan, views_of

NAMES = ["web", "code"]
RUN = [Chapter(weights={"web": 2, "code": 1}, steps=8), Chapter(weights={"web": 1}, steps=2)]
ROW = [0, 0, 5, 0, 20, 30]  # stream, pass, sample, start, length, total


def make(method: str = "random", more: str | None = None) -> RunPlan:
    """A run; with `more`, another stream is listed first."""
    names = NAMES if more is None else [more, *NAMES]
    lengths = {name: np.random.default_rng(len(name)).integers(1, 90, 300) for name in names}
    return run_plan(lengths, RUN, method=method, num_lanes=2, lane_run=2, global_batch_size=8)


def state_of(plan: RunPlan) -> dict[str, Any]:
    """The state after 20 packs."""
    [views] = views_of([2] * len(RUN), 1)
    sequence = PackSequence(plan, views)
    while sequence.position < 20:
        sequence.next()
    progress = Progress(epoch=0, position=20, snapshots=sequence.snapshots())
    walk = sequence.walk_state(0, 20) or plan.start(0)
    return json.loads(json.dumps(encode_run_state(plan, NAMES, progress, walk)))


def compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("method", ["random", "stratified", "device_per_stream", "per_stream"])
def test_a_state_comes_back_whole(method):
    plan = make(method)
    state = state_of(plan)
    progress, walk = decode_run_state(state, plan)
    assert encode_run_state(plan, NAMES, progress, walk) == state


@pytest.mark.parametrize(
    ("method", "cursor"),
    [
        ("stratified", {TURN: 2}),
        ("stratified", {TURN: -1, LEFT: 1}),
        ("random", {TURN: 1 << 40, LEFT: 1}),
        ("stratified", {LEFT: 3}),
        ("stratified", {LEFT: -1}),
        ("device_per_stream", {LEFT: 1, SERVING: 2}),
        ("device_per_stream", {LEFT: 1, SERVING: -1}),
        ("per_stream", {HOLDS: 4, CHOSEN: 2}),
        ("per_stream", {HOLDS: 4, CHOSEN: -1}),
        ("per_stream", {HOLDS: -1, CHOSEN: 0}),
        ("per_stream", {HOLDS: 9, CHOSEN: 0}),
    ],
)
def test_a_cursor_outside_of_the_lanes_and_queues_is_refused(method, cursor):
    plan = make(method)
    walk = plan.start(0)
    turn = walk.turn.copy()
    turn[list(cursor)] = list(cursor.values())
    text = walk_as_text(replace(walk, turn=turn))
    with pytest.raises(ResumeError, match=r"the state.s walk is .*its cursor .* lies outside"):
        text_as_walk(text, plan.recipes[0], len(NAMES))


@pytest.mark.parametrize("method", ["device_per_stream", "per_stream"])
def test_queues_that_a_cursor_does_not_use_may_be_any(method):
    plan = make(method)
    turn = np.array([1, 0, 99, 0, -99])
    text = walk_as_text(replace(plan.start(0), turn=turn))
    walk = text_as_walk(text, plan.recipes[0], len(NAMES))
    assert walk is not None
    assert walk.turn.tolist() == turn.tolist()


def test_a_queue_of_a_removed_stream_is_refused():
    """The walk would use it as a queue of this run."""
    walk, plan = make("device_per_stream", "math").start(0), make("device_per_stream")
    text = walk_as_text(replace(walk, turn=np.array([1, 1, -1, 0, 2])))
    with pytest.raises(ResumeError, match="its cursor"):
        text_as_walk(text, plan.recipes[0], len(NAMES) + 1)


def test_a_walk_after_the_position_is_refused():
    plan = make("stratified")
    state = state_of(plan)
    walk = replace(plan.start(0), slot=21)
    with pytest.raises(ResumeError, match=r"the state's walk's slot is 21, not .* at most 20"):
        decode_run_state(state | {"walk": walk_as_text(walk)}, plan)
    assert walk.schedule is not None
    walk = replace(walk, slot=4, schedule=replace(walk.schedule, slot=5))
    with pytest.raises(ResumeError, match="its schedule stands at 5, after slot 4"):
        decode_run_state(state | {"walk": walk_as_text(walk)}, plan)


def test_a_damaged_snapshot_is_dropped_also_where_streams_were_added(caplog):
    state = state_of(make())
    snapshots = json.loads(state["snapshots"])
    snapshots[0]["undelivered"] = rows_as_text(np.array([ROW]))

    for more in (None, "math"):
        progress, _ = decode_run_state(state | {"snapshots": snapshots}, make(more=more))
        assert len(progress.snapshots) == len(snapshots) - 1
    assert "1 of the state's snapshots are damaged" in caplog.text


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


def test_text_of_more_than_a_state_holds_is_not_unpacked():
    plan = make("stratified")
    zeros = compressed(bytes(1 << 20))
    with pytest.raises(ResumeError, match=r"or holds more than \d+ numbers"):
        text_as_walk(zeros, plan.recipes[0], len(NAMES))


def test_text_that_is_cut_off_is_refused():
    text = base64.b64encode(zlib.compress(bytes(96))[:-4]).decode()
    with pytest.raises(ResumeError, match="it is cut off"):
        text_as_walk(text, make("stratified").recipes[0], len(NAMES))
