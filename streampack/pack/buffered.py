"""Base classes for packers: a buffer that persists between calls, and a kernel that closes packs.

::

    add(e f g)      buffered a b + arriving e f g --kernel--> packs (a f) (b e), buffered g
    flush()         buffered g                    --kernel--> pack (g), nothing buffered

Cost: 20 ns a segment in addition to the kernel, and about 15 us a call, so add thousands at a time.
The packs do not depend on how segments are divided into calls. Memory: the buffered segment rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from streampack.errors import DataError, ResumeError
from streampack.pack import kernels
from streampack.pack.kernels import Limits, Work
from streampack.types import (
    LENGTH,
    NUM_COLUMNS,
    SAMPLE,
    START,
    STREAM,
    TOTAL,
    Int64Array,
    Packs,
    State,
    no_segments,
)


class BufferedPacker(ABC):
    """A packer of segment rows; implements the `Packer` protocol."""

    def __init__(self, method: str, limits: Limits):
        self._method = method
        self._limits = limits
        self._buffered = no_segments()
        # Packs emitted since each buffered segment arrived, shape (n,).
        self._waited = np.zeros(0, np.int64)
        self._high_water = (0, 0)

    @abstractmethod
    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        """Return the packs that these segments complete; with `final`, pack the whole buffer."""

    @property
    def buffered(self) -> Int64Array:
        """All segment rows in the buffer, shape (n, 6). Do not modify."""
        return self._buffered

    @property
    def num_buffered_tokens(self) -> int:
        """Tokens in the buffer, including the padding of `pad_to_multiple`."""
        return int(rooms(self._buffered, self._limits.multiple)[:, LENGTH].sum())

    @property
    def num_buffered_samples(self) -> int:
        """Number of segments in the buffer."""
        return len(self._buffered)

    @property
    def high_water_tokens(self) -> int:
        """Maximum number of tokens ever buffered."""
        return self._high_water[0]

    @property
    def high_water_samples(self) -> int:
        """Maximum number of segments ever buffered."""
        return self._high_water[1]

    def add(self, segments: Int64Array) -> Packs:
        """Add segments in arrival order, and return the packs they complete.

        Args:
            segments: Segment rows of 1 to max_seq_len tokens each, shape (n, 6).

        Raises:
            DataError: If a segment is empty or longer than a pack.
        """
        if not len(segments):
            return Packs.none()
        misfit = self._misfit(segments)
        if misfit:
            raise DataError(f"{misfit}: pass samples through fit_samples first")
        return self._pack(segments, final=False)

    def flush(self) -> Packs:
        """Pack the whole buffer and leave it empty."""
        return self._pack(no_segments(), final=True)

    def state_dict(self) -> State:
        """Return the buffer as plain integers: sample addresses, no tokens."""
        state = {
            "method": self._method,
            "buffered": self._buffered.tolist(),
            "high_water": list(self._high_water),
        }
        if self._limits.guard < kernels.NO_LIMIT:
            state["waited"] = self._waited.tolist()
        return state

    def load_state_dict(self, state: State) -> None:
        """Resume from the state of a packer with the same packing.

        Raises:
            ResumeError: If the state is of another method, or does not fit this buffer.
        """
        if state.get("method") != self._method:
            raise ResumeError(
                f"the state is of packing method {state.get('method')!r}, this packer is "
                f"{self._method!r}; resume with the packing that was saved"
            )
        buffered = np.array(state["buffered"], np.int64).reshape(-1, NUM_COLUMNS)
        limits = self._limits
        num_tokens = int(rooms(buffered, limits.multiple)[:, LENGTH].sum())
        if num_tokens > limits.buffer_tokens or len(buffered) > limits.buffer_samples:
            raise ResumeError(
                f"the state buffers {num_tokens} tokens in {len(buffered)} samples, more than "
                f"buffer_tokens={limits.buffer_tokens} or buffer_samples={limits.buffer_samples}; "
                "resume with the packing that was saved"
            )
        misfit = self._misfit(buffered)
        if misfit:
            raise ResumeError(f"the state buffers {misfit}; resume with the packing that was saved")
        self._buffered = buffered
        # Without a guard, waiting times are not saved and never used.
        waited = state.get("waited", [0] * len(buffered))
        self._waited = np.array(waited, np.int64).reshape(-1)
        tokens, samples = state["high_water"]
        self._high_water = (int(tokens), int(samples))

    def _misfit(self, segments: Int64Array) -> str:
        """Describe the first segment that does not fit a pack; empty if all do."""
        lengths = segments[:, LENGTH]
        limit = self._limits.max_seq_len
        bad = segments[(lengths < 1) | (lengths > limit)]
        if not len(bad):
            return ""
        return (
            f"stream {bad[0, STREAM]}, sample {bad[0, SAMPLE]}: a segment of {bad[0, LENGTH]} "
            f"tokens, where a pack takes 1 to max_seq_len={limit}"
        )


class Kernel(Protocol):
    """Closes packs; with `final`, also those that no further segment will fill."""

    def __call__(self, limits: Limits, work: Work, final: bool) -> None:
        """Process the arrays of one call."""


class KernelPacker(BufferedPacker):
    """A packer whose buffer is a pool that is emptied by a kernel of kernels.py."""

    def __init__(self, method: str, limits: Limits, kernel: Kernel):
        super().__init__(method, limits)
        self._kernel = kernel

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        return self._run(segments, partial(self._kernel, self._limits, final=final))

    def _run(self, segments: Int64Array, kernel: Callable[[Work], None]) -> Packs:
        multiple = self._limits.multiple
        rows = rooms(np.concatenate([self._buffered, segments]), multiple)  # a copy: cuts modify it
        num_rows, num_buffered = len(rows), len(self._buffered)
        pool = np.empty((3, num_rows), np.int64)
        pool[kernels.ORDER, :num_buffered] = np.arange(num_buffered)
        pool[kernels.BORN, :num_buffered] = -self._waited
        cursor = np.empty(kernels.NUM_CURSORS + num_rows, np.int64)
        cursor[: kernels.NUM_CURSORS] = 0
        cursor[kernels.TAIL] = cursor[kernels.NEXT] = num_buffered
        cursor[kernels.TOKENS] = rows[:num_buffered, LENGTH].sum()
        cursor[kernels.HIGH_TOKENS], cursor[kernels.HIGH_SAMPLES] = self._high_water
        out = np.empty((2 * num_rows, NUM_COLUMNS), np.int64)
        kernel(Work(rows=rows, pool=pool, out=out, cursor=cursor))
        held = pool[kernels.ORDER, cursor[kernels.HEAD] : cursor[kernels.TAIL]]
        self._buffered = without_padding(rows[held], multiple)
        self._waited = cursor[kernels.POOL_PACKS] - pool[kernels.BORN, held]
        self._high_water = (int(cursor[kernels.HIGH_TOKENS]), int(cursor[kernels.HIGH_SAMPLES]))
        ends = cursor[kernels.NUM_CURSORS : kernels.NUM_CURSORS + cursor[kernels.NUM_PACKS]]
        # Copies, because views would keep the scratch arrays of this call alive.
        return Packs(
            segments=without_padding(out[: cursor[kernels.NUM_OUT]].copy(), multiple),
            ends=ends.copy(),
        )


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
