"""The base class of packers: a state machine without I/O, with limits and a buffer.

::

    add(e f g)      buffered a b + arriving e f g -----> packs (a f) (b e), buffered g
    flush()         buffered g                    -----> pack (g), nothing buffered

Cost: about 15 us a call, so add thousands of segments at a time. Memory: the buffered segment rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from streampack.config import Packing
from streampack.errors import ResumeError
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

TOLERANCE = 1000  # a gap of at most 1 / TOLERANCE of a pack is acceptable
NO_LIMIT = 2**62


class Limits(NamedTuple):
    """Limits of a packer, in tokens unless stated otherwise.

    With `pad_to_multiple`, the length of a segment is the slots that it takes, with its padding.
    """

    pack_tokens: int
    buffer_tokens: int
    """Hard limit on the buffered tokens."""
    buffer_samples: int
    """Hard limit on the buffered segments."""
    tolerance: int
    """A pack with a gap of at most this size is full."""
    max_samples: int
    """Maximum segments per pack."""
    multiple: int
    """All lengths are multiples of this."""
    short_seq_len: int
    """Length of a block of short segments, with two tiers."""


def limits_of(packing: Packing) -> Limits:
    """Return the limits of a packing in tokens and segments."""
    return Limits(
        pack_tokens=packing.row_tokens,
        buffer_tokens=packing.buffer_limit,
        buffer_samples=packing.sample_limit,
        tolerance=packing.row_tokens // TOLERANCE,
        max_samples=packing.max_samples_per_pack or NO_LIMIT,
        multiple=packing.pad_to_multiple or 1,
        short_seq_len=packing.short_seq_len or packing.max_seq_len,
    )


class BufferedPacker(ABC):
    """Takes segments and returns packs, which depend only on the segments, not on the calls.

    The exception is a packer of windows (`Packing.packs_windows`): each call of `add` is a window.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._limits = limits_of(packing)
        self._buffered = NO_SEGMENTS
        self._high_water = (0, 0)

    @abstractmethod
    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        """Return the packs that these segments complete; with `final`, pack the whole buffer."""

    @property
    def buffered(self) -> Int64Array:
        """All segment rows in the buffer, shape (n, 6). Do not modify."""
        return self._buffered

    @property
    def high_water(self) -> tuple[int, int]:
        """Most tokens and most segments ever buffered."""
        return self._high_water

    def add(self, segments: Int64Array) -> Packs:
        """Add segment rows in arrival order, shape (n, 6); return the packs they complete."""
        return self._pack(segments, final=False) if len(segments) else NO_PACKS

    def flush(self) -> Packs:
        """Pack the whole buffer and leave it empty."""
        return self._pack(NO_SEGMENTS, final=True)

    def state_dict(self) -> State:
        """Return the buffer as plain integers: sample addresses, no tokens."""
        return {
            "method": self._packing.method,
            "buffered": self._buffered.tolist(),
            "high_water": list(self._high_water),
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state; a ResumeError refuses segments of another packing."""
        self._buffered = np.array(state["buffered"], np.int64).reshape(-1, NUM_COLUMNS)
        tokens, samples = np.array(state["high_water"], np.int64).tolist()
        self._high_water = (tokens, samples)
        lengths, most = self._buffered[:, LENGTH], self._limits.pack_tokens
        # Kernels do not check bounds.
        if len(lengths) and not 0 < lengths.min() <= lengths.max() <= most:
            raise ResumeError(
                f"the state is of segments of {lengths.min()} to {lengths.max()} tokens, not 1 to "
                f"{most}; resume with the packing that was saved"
            )

    def _note_held(self, tokens: int, samples: int) -> None:
        most_tokens, most_samples = self._high_water
        self._high_water = max(most_tokens, tokens), max(most_samples, samples)


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
