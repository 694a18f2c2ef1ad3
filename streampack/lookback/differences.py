"""The first step at which the packs of two runs differ, and why.

::

    packs of run A    a b c d | e f g h | i j       their segments, in the order of slots
    packs of run B    a b c d | e f x h | i j       step 1 differs

Cost: planning both up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from streampack.lookback.steps import OnStep, last_step, planned_engine
from streampack.plan.comparison import (
    Difference,
    Values,
    differences,
    name_of,
    run_values,
    shown_value,
)
from streampack.plan.reader import END, PlanReader, whole_views
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.types import NUM_COLUMNS, STREAM, Int64Array


def first_difference(
    first: PackedStreamingDataset,
    second: PackedStreamingDataset,
    *,
    upto: int | None = None,
    report: OnStep | None = None,
) -> int | None:
    """Return the first step at which the packs of two runs differ, or None; see `difference`."""
    found = difference(first, second, upto=upto, report=report)
    return found and found[0]


def difference(
    first: PackedStreamingDataset,
    second: PackedStreamingDataset,
    *,
    upto: int | None = None,
    report: OnStep | None = None,
) -> tuple[int, str] | None:
    """Return the first step at which the packs of two runs differ, and why, or None.

    Args:
        first: The dataset of a run. It stays as it is.
        second: That of another.
        upto: The last step to compare, or None for the last of a run of chapters, or of the first
            epoch.
        report: Called with the step that was reached, from time to time.

    Raises:
        ConfigError: If `upto` is missing and the chapters of both runs have no end.

    Streams are the same if names and contents are. Where one run ends, the other differs.
    """
    engines = planned_engine(first), planned_engine(second)
    if engines[0].fingerprint() == engines[1].fingerprint():
        return None
    if all(engine.run.spans and engine.run.spans[-1].stop_step is None for engine in engines):
        last_step(engines[0], upto)  # refuses None
    streams: dict[tuple[str, ...], int] = {}
    steps = []
    for engine in engines:
        names = [(s["name"], s["index"], s["lengths"]) for s in engine.rank_view()["streams"]]
        numbers = np.array([streams.setdefault(name, len(streams)) for name in names])
        steps.append(_steps(engine, numbers, report, is_open=upto is not None))
    for one, other in zip_longest(*steps):
        step = (one or other)[0]
        if upto is not None and step > upto:
            return None
        if one is None or other is None:
            which = "first" if other else "second"
            return step, f"the {which} {'run' if engines[0].run.chapters else 'epoch'} ends"
        if not np.array_equal(one[1], other[1]):
            return step, _reason(next(differences(*map(_values, engines))))
    return None


def _values(engine: PlanEngine) -> Values:
    values = engine.fingerprint()
    return run_values(values, engine.recipe.names, values.pop("chapters", ()))


def _reason(found: Difference) -> str:
    path, one, other = found
    is_missing = one is None or other is None
    if path[-2:-1] == ("streams",) or ("weights" in path and is_missing):
        if not is_missing:
            return f"stream {path[-1]!r} holds other samples"
        return f"stream {path[-1]!r} is in the {'second' if one is None else 'first'} run only"
    return f"{name_of(path)}: {shown_value(path, one)} -> {shown_value(path, other)}"


def _steps(
    engine: PlanEngine, numbers: Int64Array, report: OnStep | None, *, is_open: bool
) -> Iterator[tuple[int, Int64Array]]:
    """Yield each step with the segments of its packs, each behind its slot in the step.

    Streams have these `numbers`. A run of epochs has no end only if `is_open`.
    """
    rows = np.zeros((0, 2 + NUM_COLUMNS), np.int64)  # step, slot, segment
    stop = END if is_open or engine.run.chapters else (1, 0)
    with PlanReader(engine.run, whole_views(engine.views), stop=stop) as reader:
        for part in reader:
            packs, size = part.plan.packs, part.recipe.global_batch_size
            if report is not None:
                report(engine.run.step_of(part.plan.epoch, part.begin))
            slots = np.repeat(part.slots, np.diff(packs.ends, prepend=0))
            places = [engine.run.first_step(part.plan.epoch) + slots // size, slots % size]
            segments = packs.segments.astype(np.int64)
            segments[:, STREAM] = numbers[segments[:, STREAM]]
            rows = np.concatenate([rows, np.column_stack([*places, segments])])
            while len(rows) and rows[-1, 0] > rows[0, 0]:
                stop_row = int(np.searchsorted(rows[:, 0], rows[0, 0], "right"))
                yield int(rows[0, 0]), rows[:stop_row, 1:]
                rows = rows[stop_row:]
    if len(rows):
        yield int(rows[0, 0]), rows[:, 1:]
