"""The first step at which the packs of two runs differ, and why.

::

    packs of run A    a b c d | e f g h | i j       their segments, in the order of slots
    packs of run B    a b c d | e f x h | i j       step 1 differs

Cost: planning both up to there.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from streampack.plan.reader import END, PlanReader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.planned.engine import PlanEngine
from streampack.planned.refusals import check_tokenized
from streampack.types import STREAM, Int64Array


def difference(
    first: PackedStreamingDataset,
    second: PackedStreamingDataset,
    *,
    upto: int | None = None,
    report: OnStep | None = None,
) -> tuple[int, str] | None:
    """Return the first step at which the packs of two runs differ, and why, or None.

    Args:
        first: The dataset of a run, which is not changed.
        second: The dataset of another run.
        upto: The last step to compare, or None for the last of a run of chapters, or of the first
            epoch.
        report: Called from time to time with the step that was reached.

    Raises:
        ConfigError: If `upto` is missing and the chapters of both runs have no end, or texts would
            be tokenized.

    Two streams are the same if their names and contents are the same. If one run ends earlier, its
    end is the first difference.
    """
    engines = planned_engine(first), planned_engine(second)
    if engines[0].fingerprint() == engines[1].fingerprint():
        return None
    for engine in engines:
        check_tokenized(engine.spec.streams, "diff")
    if all(engine.run.chapters and engine.run.num_steps is None for engine in engines):
        last_step(engines[0], upto)  # refuses None
    streams: dict[tuple[str, ...], int] = {}
    rows = []
    for engine in engines:
        names = [(s["name"], s["index"], s["lengths"]) for s in engine.rank_view()["streams"]]
        numbers = np.array([streams.setdefault(name, len(streams)) for name in names])
        rows.append(_rows(engine, numbers, report, is_open=upto is not None))
    kind = "run" if engines[0].run.chapters else "epoch"
    one, other = (next(own, None) for own in rows)
    while one is not None and other is not None:
        num = min(len(one), len(other))
        differ = np.flatnonzero((one[:num] != other[:num]).any(axis=1))
        row = differ[0] if len(differ) else num - 1
        step = int(min(one[row, 0], other[row, 0]))
        if upto is not None and step > upto:
            return None
        if len(differ):
            return step, _reason(next(differences(*map(_values, engines))))
        one, other = (
            part[num:] if len(part) > num else next(own, None)
            for part, own in zip((one, other), rows, strict=True)
        )
    longer = other if one is None else one
    if longer is None or (upto is not None and longer[0, 0] > upto):
        return None
    return int(longer[0, 0]), f"the {'first' if one is None else 'second'} {kind} ends"


def _values(engine: PlanEngine) -> Values:
    values = engine.fingerprint()
    return run_values(values, engine.recipe.names, values.pop("chapters", ()))


def _reason(found: Difference) -> str:
    path, one, other = found
    is_missing = one is None or other is None
    if path[-2:-1] == ("streams",) or ("weights" in path and is_missing):
        if not is_missing:
            return f"stream {path[-1]!r} has other samples"
        return f"stream {path[-1]!r} is in the {'second' if one is None else 'first'} run only"
    return f"{name_of(path)}: {shown_value(path, one)} -> {shown_value(path, other)}"


def _rows(
    engine: PlanEngine, numbers: Int64Array, report: OnStep | None, *, is_open: bool
) -> Iterator[Int64Array]:
    """Yield the segments of packs, each behind its step and its slot there, shape (n, 8).

    Streams have these `numbers`. A run of epochs has no end only if `is_open`.
    """
    stop = END if is_open or engine.run.chapters else (1, 0)
    with PlanReader(engine.run.whole(), stop=stop) as reader:
        for part in reader:
            packs, size = part.plan.packs, part.recipe.global_batch_size
            if report is not None:
                report(engine.run.step_of(part.plan.epoch, part.begin))
            slots = np.repeat(part.slots, np.diff(packs.ends, prepend=0))
            segments = packs.segments.astype(np.int64)
            segments[:, STREAM] = numbers[segments[:, STREAM]]
            if len(segments):
                step = engine.run.first_step(part.plan.epoch) + slots // size
                yield np.column_stack([step, slots % size, segments])
