"""The answers of `at` and `where` match what the ranks received, in random resumed runs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import Chapter, PackedDataLoader, World, at, where
from streampack.testing import assert_exactly_once
from tests.helpers.random_runs import Case

KINDS = ["pad", "drop", "carry", "chapters"]
NUM_CASES, NUM_QUICK = 8, 2  # of each kind; each has ten checks
WORLDS = [(1, 1), (2, 1), (2, 2), (3, 3), (6, 2)]  # ranks, and ranks of a node


class Run:
    """A random run in two worlds: the batches of each rank, and the final state."""

    def __init__(self, folder: Path, kind: str, number: int) -> None:
        self.case = case = Case(folder, kind, number)
        if rest := set(case.names).difference(*(chapter.weights for chapter in case.chapters)):
            case.chapters.append(Chapter(weights={min(rest): 1}, passes=1))
        self.num_epochs = 1 if kind == "chapters" else 2
        self.skip = [(2, 3)] if kind == "chapters" and case.dice.random() < 0.5 else []
        self.rows: dict[tuple[int, int], dict[tuple[int, int, int], Any]] = defaultdict(dict)
        self.num_steps: Counter = Counter()  # of each epoch
        worlds = WORLDS[: 3 if case.size == 4 else None]
        first, second = case.dice.choice(worlds), case.dice.choice(worlds)
        stop = case.dice.randint(1, 3)
        self.states = [self._play(first, None, stop)]
        self.states.append(self._play(second, self.states[0], None))
        self.world = World(num_ranks=second[0], ranks_per_node=second[1])

    def _play(self, size: tuple[int, int], state: Any, num_steps: int | None) -> Any:
        """Iterate on each rank of a world, to the end or for some steps."""
        states = []
        for rank in range(size[0]):
            world = World(rank=rank, num_ranks=size[0], ranks_per_node=size[1])
            loader = PackedDataLoader(self.case.dataset(world, skip=self.skip))
            if state is not None:
                loader.load_state_dict(state)
            counts: Counter = Counter()
            is_last = False
            left = None if num_steps is None else num_steps * self.case.size // (2 * size[0])
            while left != 0:
                taken = 0
                for batch in islice(loader, left):
                    self._note(rank, batch, counts)
                    taken += 1
                    is_last = batch["epoch"] + 1 >= self.num_epochs
                if left is not None:
                    left -= taken
                if is_last or not taken:
                    break
            states.append(json.loads(json.dumps(loader.state_dict())))
        return states[0]

    def _note(self, rank: int, batch: dict[str, Any], counts: Counter) -> None:
        epoch = int(batch["epoch"])
        inside = (int(batch["position"]) - 1) // self.case.size
        self.num_steps[epoch] = max(self.num_steps[epoch], inside + 1)
        number = counts[epoch, inside]
        counts[epoch, inside] += 1
        rows = self.rows[epoch, inside]
        for row, *segment in batch["segments"].tolist():
            rows.setdefault((rank, number, row), []).append(segment)

    def steps(self) -> dict[int, dict[tuple[int, int, int], Any]]:
        """Return the rows by step of the run."""
        before = {
            epoch: sum(self.num_steps[each] for each in range(epoch)) for epoch in self.num_steps
        }
        if self.case.kind == "chapters":
            lengths = [chapter.steps for chapter in self.case.chapters]
            before = {number: sum(lengths[:number]) for number in range(len(lengths))}
        return {before[epoch] + inside: rows for (epoch, inside), rows in self.rows.items()}


def shown(rows: Any) -> dict[tuple[int, int, int], Any]:
    return {
        (rank, row.batch, row.row): row.segments[:, :5].tolist()
        for row in rows
        for rank in row.ranks
    }


def check_uses(run: Run) -> None:
    """Compare how often each sample was delivered with the weights, whatever worlds there were."""
    rows = [(epoch, row) for (epoch, _), own in run.rows.items() for row in own.values()]
    lengths = run.case.written.lengths
    for epoch in range(2) if run.case.kind == "pad" else ():
        segments = np.array([[0, *each] for of, row in rows if of == epoch for each in row])
        sizes = [times * len(own) for times, own in zip(run.case.times, lengths, strict=True)]
        assert_exactly_once([{"segments": segments}], lengths, sizes)
    if run.case.kind == "carry":
        uses = Counter(
            (stream, sample) for _, row in rows for stream, _, sample, start, _ in row if not start
        )
        for stream, own in enumerate(lengths):
            counts = [uses[stream, sample] for sample in range(len(own))]
            assert max(counts) - min(counts) <= (2 if len(lengths) == 1 else 3)


def check_run(folder: Path, kind: str, number: int, num_checks: int) -> None:
    """Compare `at` and `where`, from both states of a run, with the batches of the ranks."""
    run = Run(folder, kind, number)
    check_uses(run)
    got = run.steps()
    datasets = [run.case.dataset(run.world, skip=run.skip) for _ in run.states]
    for dataset, state in zip(datasets, run.states, strict=True):
        dataset.load_state_dict(state)
    dice, last = run.case.dice, max(got)
    for turn in range(num_checks):
        step, dataset = dice.choice(list(got)), datasets[turn % 2]
        found = at(dataset, step)
        assert shown(found.rows) == got[step], (step, turn)
        assert not found.is_skipped
        rank = dice.choice(list(got[step]))[0]
        own = at(dataset, step, rank=rank)
        assert shown(own.rows) == {key: row for key, row in got[step].items() if key[0] == rank}
        stream, _, sample, *_ = dice.choice(dice.choice(list(got[step].values())))
        places = {
            (number, *key): [one for one in row if (one[0], one[2]) == (stream, sample)]
            for number, rows in got.items()
            for key, row in rows.items()
        }
        name = dataset.stream_names[stream]
        seen = where(dataset, name, sample, upto=last)
        assert {
            (each.step, *key): row
            for each in seen
            if not each.is_skipped
            for key, row in shown([each.row]).items()
        } == {place: row for place, row in places.items() if row}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.slow] if number >= NUM_QUICK else [])
        for number in range(NUM_CASES)
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_held_what_the_ranks_got(kind, number, tmp_path):
    check_run(tmp_path, kind, number, num_checks=10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_so_did_ten_thousand(kind, tmp_path):
    for number in range(100, 225):
        check_run(tmp_path, kind, number, num_checks=20)
