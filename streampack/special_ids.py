"""BOS and EOS: where they are missing, and what that adds to a sample's length.

::

    bos_id=1, eos_id=2      5 6 7   --> 1 5 6 7 2     two more
                            1 5 6 2 --> 1 5 6 2       none more

The rule is here. The kernels that write the tokens follow it: `gather/kernels.py` for planned
datasets, `online/sample_store_kernels.py` for iterables.

Cost: about 0.1 us a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

import numpy as np

from streampack.config import Packing
from streampack.types import Int64Array, IntArray

NO_ID = -1
"""Stands in kernels for a BOS or EOS that is not set."""


def special_ids(packing: Packing) -> tuple[int, int]:
    """Return BOS and EOS for the kernels."""
    bos, eos = packing.bos_id, packing.eos_id
    return NO_ID if bos is None else bos, NO_ID if eos is None else eos


def adds_ids(packing: Packing) -> bool:
    """Return whether samples may get longer by BOS or EOS."""
    return packing.bos_id is not None or packing.eos_id is not None


def num_added(first: Int64Array, last: Int64Array, packing: Packing) -> Int64Array:
    """Return how many ids are missing in samples, given their first and last tokens, shape (n,).

    >>> num_added(np.array([1, 5]), np.array([5, 2]), Packing(max_seq_len=8, bos_id=1)).tolist()
    [0, 1]
    """
    added = np.zeros(len(first), np.int64)
    for special, found in ((packing.bos_id, first), (packing.eos_id, last)):
        if special is not None:
            added += found != special
    return added


def encoded_length(tokens: IntArray, packing: Packing) -> int:
    """Return the number of a sample's tokens, with BOS and EOS where they are missing.

    >>> encoded_length(np.array([1, 5]), Packing(max_seq_len=8, bos_id=1, eos_id=2))
    3
    """
    bos, eos = packing.bos_id, packing.eos_id
    num_added = int(bos is not None and tokens[0] != bos)
    return len(tokens) + num_added + int(eos is not None and tokens[-1] != eos)


def encoded_lengths(rows: Sequence[IntArray], lengths: Int64Array, packing: Packing) -> Int64Array:
    """Return `encoded_length` of each row, shape (n,); `lengths`, their own, are not 0.

    >>> rows = [np.array([1, 5]), np.array([5, 2])]
    >>> encoded_lengths(rows, np.array([2, 2]), Packing(max_seq_len=8, bos_id=1)).tolist()
    [2, 3]
    """
    for special, index in ((packing.bos_id, 0), (packing.eos_id, -1)):
        if special is not None:
            found = np.fromiter(map(methodcaller("item", index), rows), np.int64, len(rows))
            lengths = lengths + (found != special)
    return lengths
