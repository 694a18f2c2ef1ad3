"""What a report says of a run, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from streampack.errors import ConfigError, short_text
from streampack.plan.reader import PlanPart
from streampack.plan.recipe import Recipe
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.report.chapters import run_curves
from streampack.report.nodes import NodeReads
from streampack.report.simulate import simulate_with
from streampack.runtime.resumable import engine_of
from streampack.types import LENGTH, PASS, SAMPLE, STREAM, Float64Array, Int64Array, State

PLANNED_PIECES = 1_000_000  # of documents: about three seconds
LENGTHS_READ = 400_000
PACKS_KEPT = 32
NOT_MEASURED = "Not measured: give --stats, a file with the JSON of loader.stats()."
MOST_BINS = 50  # of an epoch's steps, over which shares are means


class Steps:
    """Collects what each global batch has, and the first packs."""

    def __init__(self, num_streams: int) -> None:
        self.packs: list[Int64Array] = []
        """Segments of the first packs."""
        self._num_streams = num_streams
        self._found: list[Float64Array] = []  # for `series`
        # Of the last global batch: its epoch, number, stream, pass, sample, tokens; and with the
        # first of a pack, its room.
        self._waiting = np.zeros((0, 7), np.int64)

    def add(self, part: PlanPart) -> None:
        """Count the batches of a part of the plan, which follow those of the part before."""
        packs, recipe = part.plan.packs, part.recipe
        kept = min(PACKS_KEPT - len(self.packs), len(packs.ends))
        self.packs += [packs[number] for number in range(kept)]
        sizes = np.diff(packs.ends, prepend=0)
        room = np.zeros(len(packs.segments), np.int64)
        room[(packs.ends - sizes)[sizes > 0]] = part.plan.slots_per_pack * recipe.row_tokens
        batches = np.repeat(part.slots // recipe.global_batch_size, sizes)
        own = packs.segments.T[[STREAM, PASS, SAMPLE, LENGTH]]
        new = np.column_stack([np.full(len(room), part.plan.epoch), batches, *own, room])
        rows = np.concatenate([self._waiting, new])
        is_last = (rows[:, :2] == rows[-1:, :2]).all(axis=1)
        self._finish(rows[~is_last])
        self._waiting = rows[is_last]

    def _finish(self, rows: Int64Array) -> None:
        if not len(rows):
            return
        rows = rows[np.lexsort(rows.T[4::-1])]
        is_new = np.append(True, (rows[1:, :5] != rows[:-1, :5]).any(axis=1))
        starts = np.append(True, (rows[1:, :2] != rows[:-1, :2]).any(axis=1))
        batch = np.cumsum(starts) - 1
        num = int(batch[-1]) + 1
        documents = np.add.reduceat(rows[:, 5], np.flatnonzero(is_new)).astype(np.float64)
        places = batch * self._num_streams + rows[:, 2]
        tokens = np.bincount(places, rows[:, 5], num * self._num_streams).reshape(num, -1)
        squares = np.bincount(batch[is_new], documents**2)
        columns = [np.bincount(batch, rows[:, 6]), np.bincount(batch[is_new])]
        self._found.append(np.column_stack([tokens, *columns, tokens.sum(axis=1) ** 2 / squares]))

    def series(self) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array]:
        """Return by global batch: tokens of each stream, room, documents, and effective ones."""
        self._finish(self._waiting)
        self._waiting = self._waiting[:0]
        rows = np.concatenate(self._found)
        return rows[:, :-3], rows[:, -3], rows[:, -2], rows[:, -1]


class RunFacts(NamedTuple):
    """All that a report shows."""

    engine: PlanEngine
    numbers: dict[str, Any]
    """What `simulate` returns of the steps planned."""
    is_whole: bool
    """Whether these are an epoch or the run."""
    packs: list[Int64Array]
    """Segments of the first packs."""
    steps: tuple[Float64Array, ...]
    """What `Steps.series` returns."""
    num_chapters: int
    """0: the run has epochs."""
    curves: tuple[Float64Array, Float64Array, Float64Array]
    """Tokens of the run, and there each stream's share and passes: shapes (n,), twice (n, s)."""
    nodes: list[dict[str, int]]
    state_tokens: float | None
    """Tokens of the epoch or run until the state."""
    delivered: Mapping[str, Mapping[str, float]]
    """Statistics of a loader by stream; empty without any."""
    waits: str
    """How long the loader waited for shards, or that nothing was measured."""


def run_facts(
    dataset: PackedStreamingDataset,
    state: State | None,
    stats: Mapping[str, Any] | None,
    steps: int | None,
) -> RunFacts:
    """Return what a report says; arguments as of `write_report`."""
    engine = engine_of(dataset)
    recipe, has_chapters = engine.recipe, bool(engine.run.chapters)
    stride = engine.spec.view().stride
    held = [(stream.num_tokens, stream.num_samples) for stream in recipe.streams]
    shortest = max(min(tokens / samples for tokens, samples in held), 1)
    affordable = max(int(PLANNED_PIECES / stride / (1 + recipe.row_tokens / shortest)), 1)
    last = engine.run.num_steps if has_chapters else 0
    in_run = -(-recipe.chosen_slots // recipe.row_tokens // stride)
    if has_chapters:
        in_run = affordable + 1 if last is None else len(dataset)
    most = steps or affordable
    is_whole = in_run <= most
    collected = Steps(len(recipe.streams))
    planned = None if is_whole and not has_chapters else most
    numbers = simulate_with(engine, planned, [collected.add])
    series = collected.series()
    if engine.run.chapters:
        curves = run_curves(engine)
    else:
        num = len(series[0])
        starts = np.unique(np.linspace(0, num, min(num, MOST_BINS) + 1).astype(int))
        each = np.add.reduceat(series[0], starts[:-1])
        each = np.concatenate([each[:1], each])  # the first, once more: where the epoch begins
        tokens, shares = np.cumsum(each, axis=0), each / each.sum(axis=1, keepdims=True)
        tokens -= each[0]
        curves = tokens.sum(axis=1), shares, tokens / [max(tokens, 1) for tokens, _ in held]
    nodes = numbers["nodes"]
    if not is_whole:
        epoch = [s.chosen_tokens / max(s.num_tokens, 1) for s in recipe.streams]
        nodes = NodeReads(engine).expected(curves[2][-1] if has_chapters else np.array(epoch))
    streams: Mapping[str, Any] = {}
    waits = NOT_MEASURED
    if stats is not None:
        streams = _streams_in(stats)
        if shards := stats.get("shards"):
            waits = f"waited {shards['waited_s']:,.2f} s for {shards['waited_for']:,} of them"
            waits = f"The loader fetched {shards['fetched']:,} shards, and {waits}."
    num_chapters = len(engine.run.chapters)
    return RunFacts(
        *(engine, numbers, is_whole, collected.packs, series, num_chapters, curves, nodes),
        *(_state_tokens(dataset, engine, state), streams, waits),
    )


def _streams_in(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    streams = stats.get("streams") if isinstance(stats, Mapping) else None
    if not isinstance(streams, Mapping):
        raise ConfigError(
            f"stats={short_text(stats)} has no streams; pass what loader.stats() returns, or the "
            "file to which json.dump(loader.stats(), file) wrote it"
        )
    return streams


def _state_tokens(
    dataset: PackedStreamingDataset, engine: PlanEngine, state: State | None
) -> float | None:
    if state is None:
        return None
    if not engine.run.chapters:
        dataset.with_arguments().load_state_dict(state)  # refuses a state of another run
        return float(state["position"] * engine.recipe.row_tokens)
    number, position = engine.check_state(state)  # as above
    sizes = [recipe.row_tokens for recipe in engine.run.recipes]
    before = zip(engine.run.chapters[:number], sizes, strict=False)
    return sum((each.num_slots or 0) * size for each, size in before) + position * sizes[number]


def stream_lengths(recipe: Recipe) -> dict[str, tuple[Int64Array, int, int]]:
    """Return by stream lengths of documents, and the shards read of all; empty without lengths."""
    found = {}
    for stream in recipe.streams:
        lengths_of, num = stream.whole_lengths_of or stream.lengths_of, len(stream.raw_bytes)
        if stream.prepare is None:  # else shards would be fetched for them
            most = int(np.ceil(LENGTHS_READ * num / max(stream.num_samples, 1)))
            shards = np.unique(np.linspace(0, num - 1, min(num, most)).astype(int)).tolist()
            lengths = np.concatenate([lengths_of(shard) for shard in shards])
            found[stream.name] = lengths[lengths > 0], len(shards), num
    return found
