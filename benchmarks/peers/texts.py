"""What the adapters of texts share: processor time of a process tree, and what a pass delivered.

::

    meter = Meter()     pass_over(batches, ...) --> tokens, fill, deviation of the mixture
    meter.seconds       processor seconds since, of this process and all that it started

A pass ends with as many tokens as both sets have, so each text is tokenized about once.

Cost: 20 ms for a reading of the meter.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import text_sets

from peers.task import Measured, Task

__all__ = ["RANKS", "STEPS", "Meter", "pass_over", "size_of"]

STEPS = 100  # after which the mixture is looked at, and of all ranks together before a resume
RANKS = 4  # before a resume on half of them
STATE, PARENT, USER, CHILDREN_SYSTEM = 0, 1, 11, 14  # fields of /proc/*/stat, after the name


def tree_seconds() -> float:
    """Return the processor seconds of this process and its descendants, ended or not."""
    rows: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        spent = sum(map(int, fields[USER : CHILDREN_SYSTEM + 1]))
        rows[int(path.parent.name)] = int(fields[PARENT]), spent
    known, found = {os.getpid()}, {os.getpid()}
    while found:
        found = {pid for pid, (parent, _) in rows.items() if parent in found} - known
        known |= found
    if not rows:  # no /proc: those that have ended
        times = os.times()
        return sum(times[:4])
    return sum(rows[pid][1] for pid in known if pid in rows) / os.sysconf("SC_CLK_TCK")


class Meter:
    """Processor seconds and wall time since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = tree_seconds(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Return the seconds as fields of a `Measured`."""
        seconds = time.perf_counter() - self._wall
        return {"cpu_s": tree_seconds() - self._cpu, "seconds": seconds}


def size_of(state: Any) -> int:
    """Return the bytes of a state."""
    return len(pickle.dumps(state))


def pass_over(
    task: Task,
    meter: Meter,
    batches: Iterable[tuple[int, npt.NDArray[np.int64]]],
    **more: Any,
) -> Measured:
    """Take batches until as many tokens were delivered as the sets have.

    Args:
        task: The task.
        meter: Made before the loader was.
        batches: Slots, and tokens of each set, of every batch.
        more: What else to report.
    """
    counts = np.array([each["tokens"] for each in text_sets.sets_of(task.raw).values()])
    target = counts / counts.sum()
    totals, slots, apart = np.zeros(len(counts), np.int64), 0, []
    first: dict[str, float] = {}
    num_first = 0
    for number, (num_slots, tokens) in enumerate(batches, 1):
        totals, slots = totals + tokens, slots + num_slots
        if not first:
            first, num_first = meter.stop(), int(tokens.sum())
        if number % STEPS == 0:
            apart.append(float(np.abs(totals / totals.sum() - target).max()))
        if totals.sum() >= counts.sum():
            break
    whole, num_tokens = meter.stop(), int(totals.sum())
    more["first_batch_cpu_s"] = round(first["cpu_s"], 2)
    # Without the start of a peer, though what it tokenized ahead until then is not counted either.
    later = max(whole["cpu_s"] - first["cpu_s"], 1e-2)
    more["tokens_per_cpu_s_after"] = round((num_tokens - num_first) / later)
    if apart:
        more["deviation"] = {"mean": round(float(np.mean(apart)), 5), "max": round(max(apart), 5)}
    return Measured(tokens=num_tokens, slots=slots, **whole, more=more)
