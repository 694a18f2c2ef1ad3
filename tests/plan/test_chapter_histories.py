"""Plans of runs of chapters that are killed, edited, amended, and resumed in other worlds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streampack.chapters import Chapter
from streampack.config import Order
from streampack.plan.chapter_edits import (
    RunChapter,
    amend_chapters,
)
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, decode_state, encode_state
from streampack.types import STREAM
from tests.helpers.chapters import (
    LENGTHS,
    plan_packs,
    run_packs,
    run_plan,
    some_chapters,
    some_weights,
    views_of,
)
from tests.helpers.examples import examples

SIZE = 16  # packs of a global batch
NAMES = list(LENGTHS)
METHODS = ["random", "stratified", "device_per_stream", "per_stream"]


pytestmark = pytest.mark.usefixtures("small_chunks")


class History(RuleBasedStateMachine):
    """A run where only JSON survives a kill, compared at the end with one that never stopped."""

    @initialize(
        run=some_chapters(may_be_open=True),
        order=st.permutations(NAMES),
        method=st.sampled_from(METHODS),
        unit=st.sampled_from(["samples", "tokens"]),
        num_lanes=st.sampled_from([1, 2, 4]),
        window=st.sampled_from([0, 64]),
    )
    def begin(self, run, order, method, unit, num_lanes, window) -> None:
        self.options = {
            "method": method,
            "unit": unit,
            "order": Order(seed=3, pack_shuffle=window),
            "num_lanes": num_lanes,
        }
        self.run = list(run)
        self.names = [name for name in order if name in self.used]
        self.skips: list[tuple[int, int]] = []
        self.got: list = []
        self.state = self.saved(self.plan(), Progress(epoch=0, position=0))

    def list_used(self) -> None:
        self.names += [name for name in NAMES if name in self.used and name not in self.names]

    @property
    def used(self) -> set[str]:
        return {name for chapter in self.run for name in chapter.weights}

    def plan(self) -> RunPlan:
        lengths = {name: LENGTHS[name] for name in self.names}
        return run_plan(lengths, self.run, lane_turn=2, global_batch_size=SIZE, **self.options)

    def saved(self, plan: RunPlan, progress: Progress) -> dict[str, Any]:
        return json.loads(json.dumps(encode_state(plan, self.names, progress)))

    def resumed(self) -> tuple[RunPlan, Progress]:
        """The run in its current form, resumed from the saved state."""
        plan = self.plan()
        return plan, decode_state(self.state, plan, self.names)

    @property
    def current(self) -> int:
        return self.state["epoch"]

    def steps_begun(self, plan: RunPlan) -> int:
        return -(-self.state["position"] // plan.recipes[self.current].global_batch_size)

    def is_over(self) -> bool:
        slots = self.plan().chapters[self.current].num_slots
        return self.state["position"] == slots and self.current + 1 == len(self.run)

    @precondition(lambda self: not self.is_over())
    @rule(
        num_devices=st.sampled_from([1, 2, 4]),
        num_batches=st.integers(1, 30),
        is_small=st.booleans(),
        keeps_snapshots=st.booleans(),
    )
    def run_until_killed(self, num_devices, num_batches, is_small, keeps_snapshots) -> None:
        plan, start = self.resumed()
        batch_size = 1 if is_small or start.position % 2 else 2
        if self.skips and start.position % (batch_size * num_devices):
            num_devices = 1  # with more devices, a step could contain part of a skipped one
        ends, joined = set(), {}
        for views in views_of([batch_size] * len(self.run), num_devices):
            sequence = PackSequence(
                plan.seen(views),
                start,
                skips=self.skips,
            )
            end = start.epoch, start.position
            for _ in range(num_batches):
                batch = sequence.next()
                if batch is None:
                    end = sequence.epoch, sequence.num_slots
                    break
                self.got += self.by_name(plan_packs(batch, views[batch.epoch]), self.names)
                end = batch.epoch, batch.position
            ends.add(end)
            for snapshot in sequence.snapshots():
                joined.setdefault((snapshot["lane"], snapshot["queue"]), snapshot)
            sequence.close()
        [(epoch, position)] = ends
        snapshots = list(joined.values()) if keeps_snapshots else []
        progress = Progress(epoch=epoch, position=position, snapshots=snapshots)
        self.state = self.saved(plan, progress)

    @rule(run=some_chapters(may_be_open=True))
    def edit_what_comes(self, run) -> None:
        self.run = [*self.run[: self.current + 1], *run]
        self.list_used()
        running = self.run[self.current]
        if running.is_open:
            self.run[self.current] = replace(running, steps=self.steps_begun(self.plan()) + 1)

    @precondition(lambda self: not self.run[self.current].ramps)
    @precondition(lambda self: self.run[self.current].stop_after is None)
    @rule(more=st.integers(0, 4))
    def change_the_length_of_the_running_chapter(self, more) -> None:
        steps = max(self.steps_begun(self.plan()) + more, 1)
        self.run[self.current] = replace(self.run[self.current], steps=steps)

    @rule(own=some_weights())
    def amend(self, own) -> None:
        self.names += [name for name in own if name not in self.names]
        plan, progress = self.resumed()
        number, steps = progress.epoch, self.steps_begun(plan)
        slots = plan.chapters[number].num_slots
        size = plan.recipes[number].global_batch_size
        if slots is not None and steps * size == slots:
            number, steps = number + 1, 0
            if progress.position < slots or number == len(self.run):
                return  # the chapter ends with this global batch
            slots, size = plan.chapters[number].num_slots, plan.recipes[number].global_batch_size
        length = None if slots is None else slots // size
        chapters = [RunChapter(chapter, n, length) for n, chapter in enumerate(self.run)]
        amended = amend_chapters(chapters, number, own, after=steps)
        self.run = [each.chapter for each in amended]
        self.state = self.saved(self.plan(), progress)

    @rule(ahead=st.integers(0, 5), num=st.integers(1, 3))
    def skip(self, ahead, num) -> None:
        plan = self.plan()
        first = plan.first_step(self.current) + self.steps_begun(plan) + ahead
        self.skips.append((first, first + num))

    @rule(order=st.permutations(NAMES), num=st.integers(0, 4))
    def list_other_streams(self, order, num) -> None:
        """Add or remove streams that were never used; those in use keep their order."""
        ran = {name for chapter in self.run[: self.current + 1] for name in chapter.weights}
        ran_in_order = iter([name for name in self.names if name in ran])
        listed = [name for number, name in enumerate(order) if name in self.used or number < num]
        self.names = [next(ran_in_order) if name in ran else name for name in listed]

    def by_name(self, packs, names) -> list:
        return [
            (
                chapter,
                slot,
                [(names[row[STREAM]], *row[:STREAM], *row[STREAM + 1 :]) for row in rows],
            )
            for chapter, slot, rows in packs
        ]

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        end = self.current, self.state["position"]
        if self.run[-1].is_open:
            self.run[-1] = replace(self.run[-1], steps=max(self.steps_begun(self.plan()), 1))
        plan = self.plan()
        whole = run_packs(plan, [2] * len(self.run), skips=self.skips)
        whole = [pack for pack in self.by_name(whole, self.names) if pack[:2] < end]
        assert sorted(self.got, key=lambda pack: pack[:2]) == whole


def play(num_histories: int, **more: int) -> None:
    settings = examples(num_histories, stateful_step_count=8, **more)
    run_state_machine_as_test(History, settings=settings)


def begun(run):
    """Begin a history of one lane, with packs that mix streams by samples."""
    history = History()
    history.begin(
        run=run,
        order=list(NAMES),
        method="random",
        unit="samples",
        num_lanes=1,
        window=0,
    )
    return history


def test_a_step_over_the_edge_of_a_chapter_ends_with_the_chapter():
    """Two ranks resume at an odd position, so one of them has no pack in the last step."""
    web = {"weights": {"web": 1}}
    history = begun([Chapter(steps=4, global_batch_size=8, **web), Chapter(steps=1, **web)])
    keeps = {"is_small": True, "keeps_snapshots": False}
    for num_devices, num_batches in ((1, 3), (2, 15), (1, 1)):
        history.run_until_killed(num_devices=num_devices, num_batches=num_batches, **keeps)
    history.teardown()


def test_a_stream_without_a_share_changes_no_pack_of_a_small_stream():
    history = begun([Chapter(weights={"math": 1}, steps=1)] * 2)
    keeps = {"is_small": False, "keeps_snapshots": False}
    history.run_until_killed(num_devices=1, num_batches=8, **keeps)
    history.amend(own={"web": 1})
    history.teardown()


@pytest.mark.parametrize("unit", ["samples", "tokens"])
@pytest.mark.parametrize("method", METHODS)
@examples(10)
@given(chapters=some_chapters(), num_lanes=st.sampled_from([1, 2]), window=st.sampled_from([0, 64]))
def test_streams_that_no_chapter_uses_change_no_pack(method, unit, chapters, num_lanes, window):
    used = {name for chapter in chapters for name in chapter.weights}
    packs = []
    for names in (sorted(used), [*sorted(used), *sorted(set(NAMES) - used)]):
        plan = run_plan(
            {name: LENGTHS[name] for name in names},
            chapters,
            method=method,
            unit=unit,
            num_lanes=num_lanes,
            order=Order(seed=3, pack_shuffle=window),
            global_batch_size=SIZE,
        )
        packs.append(run_packs(plan, [1] * len(chapters)))

    assert packs[0] == packs[1]


@pytest.mark.thorough
def test_any_history_gives_what_the_run_that_never_stopped_does():
    play(30, many=150)


@pytest.mark.slow
def test_so_do_ten_thousand_histories():
    play(10_000)
