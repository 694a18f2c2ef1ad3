"""A packer: what is buffered between two calls, and a kernel that closes packs.

::

    add(e f g)      buffered a b + arriving e f g --kernel--> packs (a f) (b e), buffered g
    flush()         buffered g                    --kernel--> pack (g), nothing buffered

Cost: 20 ns a segment beside the kernel, and about 15 us a call: add thousands at a time. The packs
do not depend on how the segments are dealt to calls. Memory: the buffered segment rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from streampack.errors import DataError, ResumeError
from streampack.pack import kernels
from streampack.pack.kernels import Limits, Work
from streampack.types import (
    LENGTH,
    NUM_COLUMNS,
    SAMPLE,
    STREAM,
    Int64Array,
    Packs,
    State,
    no_segments,
)

__all__ = ["BufferedPacker"]


class BufferedPacker:
    """Segment rows in, packs out, by one kernel; it follows the `Packer` protocol."""

    def __init__(self, method: str, limits: Limits, kernel: Callable[[Limits, Work, bool], None]):
        self._method = method
        self._limits = limits
        self._kernel = kernel
        self._buffered = no_segments()
        self._high_water = (0, 0)

    @property
    def num_buffered_tokens(self) -> int:
        """Tokens in the buffer now."""
        return int(self._buffered[:, LENGTH].sum())

    @property
    def num_buffered_samples(self) -> int:
        """Segments in the buffer now."""
        return len(self._buffered)

    @property
    def high_water_tokens(self) -> int:
        """The most tokens that were ever buffered."""
        return self._high_water[0]

    @property
    def high_water_samples(self) -> int:
        """The most segments that were ever buffered."""
        return self._high_water[1]

    def add(self, segments: Int64Array) -> Packs:
        """Take segments in arrival order; return the packs they complete.

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
        return self._run(segments, final=False)

    def flush(self) -> Packs:
        """Return packs of all that is buffered; the buffer is empty then."""
        return self._run(no_segments(), final=True)

    def state_dict(self) -> State:
        """Return what is buffered, as plain integers: addresses, no tokens."""
        return {
            "method": self._method,
            "buffered": self._buffered.tolist(),
            "high_water": list(self._high_water),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of a packer with the same packing.

        Raises:
            ResumeError: If the state is another method's, or holds what this buffer cannot.
        """
        if state.get("method") != self._method:
            raise ResumeError(
                f"the state is of packing method {state.get('method')!r}, this packer is "
                f"{self._method!r}; resume with the packing that was saved"
            )
        buffered = np.array(state["buffered"], np.int64).reshape(-1, NUM_COLUMNS)
        num_tokens = int(buffered[:, LENGTH].sum())
        limits = self._limits
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
        tokens, samples = state["high_water"]
        self._high_water = (int(tokens), int(samples))

    def _misfit(self, segments: Int64Array) -> str:
        """Name the first segment that no pack can hold; empty if there is none."""
        lengths = segments[:, LENGTH]
        limit = self._limits.max_seq_len
        bad = segments[(lengths < 1) | (lengths > limit)]
        if not len(bad):
            return ""
        return (
            f"stream {bad[0, STREAM]}, sample {bad[0, SAMPLE]}: a segment of {bad[0, LENGTH]} "
            f"tokens, where a pack takes 1 to max_seq_len={limit}"
        )

    def _run(self, segments: Int64Array, *, final: bool) -> Packs:
        rows = np.concatenate([self._buffered, segments])
        num_rows, num_buffered = len(rows), len(self._buffered)
        order = np.empty(num_rows, np.int64)
        order[:num_buffered] = np.arange(num_buffered)
        cursor = np.zeros(kernels.NUM_CURSORS, np.int64)
        cursor[kernels.TAIL] = cursor[kernels.NEXT] = num_buffered
        cursor[kernels.TOKENS] = self.num_buffered_tokens
        cursor[kernels.HIGH_TOKENS], cursor[kernels.HIGH_SAMPLES] = self._high_water
        work = Work(
            rows=rows,
            order=order,
            chosen=np.empty(num_rows, np.bool_),
            out=np.empty((2 * num_rows, NUM_COLUMNS), np.int64),
            ends=np.empty(num_rows, np.int64),
            cursor=cursor,
        )
        self._kernel(self._limits, work, final)
        self._buffered = rows[order[cursor[kernels.HEAD] : cursor[kernels.TAIL]]]
        self._high_water = (int(cursor[kernels.HIGH_TOKENS]), int(cursor[kernels.HIGH_SAMPLES]))
        # Copies: a view would keep the whole scratch of this call alive.
        return Packs(
            segments=work.out[: cursor[kernels.NUM_OUT]].copy(),
            ends=work.ends[: cursor[kernels.NUM_PACKS]].copy(),
        )
