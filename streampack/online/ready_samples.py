"""Samples of one stream that were read and not taken yet, in columns.

::

    append, extend -->  pass number taken length      a line a sample --> table
                        tokens, labels, loss masks    its arrays      --> lists
                        remove <-- the first ones leave

Reading a list gives hundreds of samples at a time, and packing takes them so. Columns are sliced in
one step, where objects would cost a step of Python each.

Cost: about 0.1 us per sample in groups, 0.4 us alone. Memory: the arrays.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.errors import DataError
from streampack.online.source_slice import Items
from streampack.streams import IterableSample
from streampack.types import Int64Array

PASS_AT, NUMBER_AT, TAKEN_AT, LENGTH_AT = range(4)  # TAKEN_AT: items before it in its pass
NUM_FIELDS = 4


@dataclass(slots=True, eq=False)
class ComplexSample:
    """A sample that is more than plain arrays, or longer than a pack, or bad."""

    item: Any
    """Its item, or the error of reading it; None: only the parsed one is kept."""
    sample: IterableSample | DataError | None = None
    """The parsed item, or the error; None: not parsed yet."""

    def __len__(self) -> int:
        """Return its own tokens, without BOS and EOS; 0 if it is not parsed or bad."""
        return len(self.sample.tokens) if isinstance(self.sample, IterableSample) else 0


class ReadySamples:
    """A queue of samples of one stream.

    With `has_labels`, any stream has labels: a sample's arrays are tokens, labels and loss mask.
    Otherwise they are only tokens.
    """

    def __init__(self, *, has_labels: bool) -> None:
        self._has_labels = has_labels
        self._table = array("q")  # numpy arrays cannot grow
        self.tokens: list[Any] = []
        """Token ids of each sample, shape (num_tokens,), or a `ComplexSample`."""
        self.labels: list[Any] = []
        """Labels or None, if any stream has labels; else empty."""
        self.masks: list[Any] = []
        """Loss masks or None, if any stream has labels; else empty."""

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, line: tuple[int, int, int, int], plain: tuple[Any, Any, Any]) -> None:
        """Add a sample, with its arrays or a `ComplexSample` in place of its tokens.

        `line` holds its pass, its number, the items of the slice before it in that pass, and its
        tokens, with BOS and EOS; 0: it is a `ComplexSample`.
        """
        self._table.extend(line)
        self.tokens.append(plain[0])
        if self._has_labels:
            self.labels.append(plain[1])
            self.masks.append(plain[2])

    def extend(self, items: Items, lengths: Int64Array) -> None:
        """Add items that are arrays of token ids; `lengths` count BOS and EOS.

        Where a length is 0, the item is a `ComplexSample`, not parsed yet.
        """
        num, before = len(lengths), len(self)
        lines = np.empty((num, NUM_FIELDS), np.int64)
        lines[:, PASS_AT] = items.pass_
        lines[:, NUMBER_AT] = np.fromiter(items.numbers, np.int64, num)
        lines[:, TAKEN_AT] = np.arange(items.taken, items.taken + num)
        lines[:, LENGTH_AT] = lengths
        self._table.frombytes(lines.tobytes())
        self.tokens += items.values
        for index in np.flatnonzero(lengths == 0).tolist():
            self.tokens[before + index] = ComplexSample(items.values[index])
        if self._has_labels:
            self.labels += [None] * num
            self.masks += [None] * num

    def length(self, index: int) -> int:
        """Return a sample's tokens, with BOS and EOS; 0: it is a `ComplexSample`."""
        return self._table[NUM_FIELDS * index + LENGTH_AT]

    def origin(self, index: int) -> tuple[int, int, int]:
        """Return a sample's pass, its number, and the items before it in that pass."""
        pass_, number, taken, _ = self._table[NUM_FIELDS * index : NUM_FIELDS * (index + 1)]
        return pass_, number, taken

    def lengths(self, begin: int) -> Int64Array:
        """Return the lengths of all samples from one on, shape (n,); see `length`."""
        lengths: Int64Array = np.frombuffer(self._table[NUM_FIELDS * begin :], np.int64)
        return lengths[LENGTH_AT::NUM_FIELDS]

    def first(self, num: int) -> tuple[Int64Array, tuple[list[Any], ...]]:
        """Return the first `num` samples.

        Returns:
            Pass, number, items before it in that pass, and length of each, shape (num, NUM_FIELDS).
            A list of their tokens; if any stream has labels, also lists of labels and loss masks.
        """
        lines: Int64Array = np.frombuffer(self._table[: NUM_FIELDS * num], np.int64)
        arrays: tuple[list[Any], ...] = (self.tokens[:num],)
        if self._has_labels:
            arrays = (self.tokens[:num], self.labels[:num], self.masks[:num])
        return lines.reshape(num, NUM_FIELDS), arrays

    def remove(self, begin: int, end: int) -> tuple[int, int]:
        """Remove samples; return the last one's pass, and the position behind it in that pass."""
        last = self._table[NUM_FIELDS * (end - 1) : NUM_FIELDS * end]
        del self._table[NUM_FIELDS * begin : NUM_FIELDS * end]
        for column in (self.tokens, self.labels, self.masks):
            del column[begin:end]
        return last[PASS_AT], last[TAKEN_AT] + 1

    def clear(self) -> None:
        """Remove all samples."""
        del self._table[:]
        for column in (self.tokens, self.labels, self.masks):
            column.clear()
