"""Base classes for packers: limits, a buffer that persists between calls, a kernel for packs.

::

    add(e f g)      buffered a b + arriving e f g --kernel--> packs (a f) (b e), buffered g
    flush()         buffered g                    --kernel--> pack (g), nothing buffered

Cost: 20 ns a segment in addition to the kernel, and about 15 us a call, so add thousands at a time.
The packs do not depend on how segments are divided into calls. Memory: the buffered segment rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from streampack.config import Packing
from streampack.errors import ResumeError
from streampack.pack import kernels
from streampack.pack.kernels import NO_LIMIT, Limits, Work
from streampack.types import (
    LENGTH,
    NO_PACKS,
    NO_SEGMENTS,
    NUM_COLUMNS,
    START,
    TOTAL,
    Int64Array,
    Packs,
    State,
)

SEARCH_TOKENS = 8192
TOLERANCE = 1000  # a gap of at most 1 / TOLERANCE of a pack is acceptable ...
PATIENCE = 16  # ... if this many more looks find nothing better


def limits_of(packing: Packing) -> Limits:
    """Return the limits of a packing in tokens and segments."""
    size, multiple = packing.row_tokens, packing.pad_to_multiple or 1
    # Exact decimal arithmetic: 0.29 of 100 tokens is 29, not 28.999...
    gap, fragment = size, 1
    if packing.split_gap is not None:
        gap, fragment = int(Fraction(str(packing.split_gap)) * size), packing.least_fragment
    return Limits(
        pack_tokens=size,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.buffer_samples,
        search_tokens=min(size, SEARCH_TOKENS),
        tolerance=size // TOLERANCE,
        patience=PATIENCE,
        split_gap=gap,
        # The padding in a segment's room may make the last piece of a sample this much shorter.
        min_fragment=fragment + multiple - 1,
        guard=packing.guard or NO_LIMIT,
        max_samples=packing.max_samples_per_pack or NO_LIMIT,
        multiple=multiple,
    )


class BufferedPacker(ABC):
    """A packer of segment rows; implements the `Packer` protocol."""

    def __init__(self, method: str, limits: Limits):
        self._method = method
        self._limits = limits
        self._buffered = NO_SEGMENTS
        # Packs emitted since each buffered segment arrived, shape (n,).
        self._waited = np.zeros(0, np.int64)
        self._high_water = (0, 0)

    @abstractmethod
    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        """Return the packs that these segments complete; with `final`, pack the whole buffer."""

    @property
    def buffered(self) -> Int64Array:
        return self._buffered

    @property
    def held(self) -> tuple[int, int]:
        """Tokens in the buffer, including the padding of `pad_to_multiple`, and segments."""
        return int(rooms(self._buffered, self._limits.multiple)[:, LENGTH].sum()), len(
            self._buffered
        )

    @property
    def high_water(self) -> tuple[int, int]:
        return self._high_water

    def add(self, segments: Int64Array) -> Packs:
        return self._pack(segments, final=False) if len(segments) else NO_PACKS

    def add_until(self, segments: Int64Array, num_packs: int) -> tuple[Packs, int]:
        """Add segments by one call each; see `Packer.add_until`."""
        packs: list[Packs] = []
        num_added = 0
        while num_added < len(segments) and sum(map(len, packs)) < num_packs:
            packs.append(self.add(segments[num_added : num_added + 1]))
            num_added += 1
        return Packs.join(packs), num_added

    def flush(self) -> Packs:
        return self._pack(NO_SEGMENTS, final=True)

    def state_dict(self) -> State:
        """Return the buffer as plain integers: sample addresses, no tokens."""
        state = {
            "method": self._method,
            "buffered": self._buffered.tolist(),
            "high_water": list(self._high_water),
        }
        if self._limits.guard < NO_LIMIT:
            state["waited"] = self._waited.tolist()
        return state

    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state; a ResumeError refuses one of another packing."""
        problem, most = "", self._limits.pack_tokens
        if state.get("method") != self._method:
            problem = f"packing method {state.get('method')!r}, but this packer is {self._method!r}"
        else:
            self._restore(state)
            lengths = self._buffered[:, LENGTH]
            # The kernels do not check bounds.
            if len(lengths) and not 0 < lengths.min() <= lengths.max() <= most:
                problem = f"segments of {lengths.min()} to {lengths.max()} tokens, not 1 to {most}"
        if problem:
            raise ResumeError(f"the state is of {problem}; resume with the packing that was saved")

    def _restore(self, state: State) -> None:
        self._buffered = np.array(state["buffered"], np.int64).reshape(-1, NUM_COLUMNS)
        # Without a guard, waiting times are not saved and never used.
        waited = state.get("waited", [0] * len(self._buffered))
        self._waited = np.array(waited, np.int64).reshape(-1)
        tokens, samples = np.array(state["high_water"], np.int64).tolist()
        self._high_water = (tokens, samples)

    def open_work(self, segments: Int64Array, num_rows: int = 0) -> Work:
        """Return the buffer and these segments for a kernel, with room for `num_rows` in all."""
        num_held, multiple = len(self._buffered), self._limits.multiple
        num_known = num_held + len(segments)
        num_rows = max(num_rows, num_known)
        rows = np.empty((num_rows, NUM_COLUMNS), np.int64)
        rows[:num_held], rows[num_held:num_known] = (
            rooms(each, multiple) for each in (self._buffered, segments)
        )
        pool = np.empty((3, num_rows), np.int64)
        pool[kernels.ORDER, :num_held] = np.arange(num_held)
        pool[kernels.BORN, : len(self._waited)] = -self._waited
        cursor = np.empty(kernels.NUM_CURSORS + num_rows, np.int64)
        cursor[: kernels.NUM_CURSORS] = 0
        cursor[kernels.TAIL] = cursor[kernels.NEXT] = num_held
        cursor[kernels.NUM_ROWS], cursor[kernels.MOST_PACKS] = num_known, NO_LIMIT
        cursor[kernels.TOKENS] = rows[:num_held, LENGTH].sum()
        cursor[kernels.HIGH_TOKENS], cursor[kernels.HIGH_SAMPLES] = self._high_water
        out = np.empty((2 * num_rows, NUM_COLUMNS), np.int64)
        return Work(rows=rows, pool=pool, out=out, cursor=cursor)

    def close_work(self, work: Work) -> Packs:
        """Buffer the segments that a kernel left in the pool; return the packs that it closed."""
        cursor, multiple = work.cursor, self._limits.multiple
        held = work.pool[kernels.ORDER, cursor[kernels.HEAD] : cursor[kernels.TAIL]]
        self._buffered = without_padding(work.rows[held], multiple)
        self._waited = cursor[kernels.POOL_PACKS] - work.pool[kernels.BORN, held]
        self._high_water = (int(cursor[kernels.HIGH_TOKENS]), int(cursor[kernels.HIGH_SAMPLES]))
        ends = cursor[kernels.NUM_CURSORS : kernels.NUM_CURSORS + cursor[kernels.NUM_PACKS]]
        # Copies, because views would keep the scratch arrays of this call alive.
        out = without_padding(work.out[: cursor[kernels.NUM_OUT]].copy(), multiple)
        return Packs(segments=out, ends=ends.copy())


Kernel: TypeAlias = Callable[[Limits, Work, bool], None]
"""Closes packs; if the bool is True, also those that no further segment will fill."""


class KernelPacker(BufferedPacker):
    """A packer with a buffer that a kernel of kernels.py empties."""

    def __init__(self, method: str, limits: Limits, kernel: Kernel):
        super().__init__(method, limits)
        self._kernel = kernel

    def add_until(self, segments: Int64Array, num_packs: int) -> tuple[Packs, int]:
        """Add segments in one call of the kernel; see `Packer.add_until`."""
        return self._call_kernel(segments, most_packs=num_packs)

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        return self._call_kernel(segments, final=final)[0]

    def _call_kernel(
        self, segments: Int64Array, *, final: bool = False, most_packs: int = NO_LIMIT
    ) -> tuple[Packs, int]:
        num_held, work = len(self._buffered), self.open_work(segments)
        work.cursor[kernels.MOST_PACKS] = most_packs
        self._kernel(self._limits, work, final)
        return self.close_work(work), int(work.cursor[kernels.NEXT]) - num_held


def rooms(segments: Int64Array, multiple: int) -> Int64Array:
    """Replace each segment's length by the slots it takes in a pack, shape (n, 6).

    >>> rooms(np.array([[0, 0, 7, 0, 13, 13]]), 8)[0].tolist()
    [0, 0, 7, 0, 16, 13]
    """
    if multiple > 1:
        segments = segments.copy()
        segments[:, LENGTH] = -(-segments[:, LENGTH] // multiple) * multiple
    return segments


def without_padding(segments: Int64Array, multiple: int) -> Int64Array:
    """Undo `rooms`, in place. Only the last piece of a sample is followed by padding.

    >>> without_padding(np.array([[0, 0, 7, 0, 16, 13]]), 8)[0].tolist()
    [0, 0, 7, 0, 13, 13]
    """
    if multiple > 1:
        left = segments[:, TOTAL] - segments[:, START]
        segments[:, LENGTH] = np.minimum(segments[:, LENGTH], left)
    return segments
