"""Which epoch an iteration is, agreed upon by worker processes that never speak to each other.

torch's DataLoader starts (or resumes) its workers for every epoch and tells the dataset nothing; a
dataset that counts its own iterations starts again at epoch 0 in every new worker. So the count
lives in a page that parent and workers share, one word for each worker::

    word of worker w     [ key of the iteration : 32 | epoch + 1 : 31 ]

Workers of one iteration know the same key (the loader's base seed, and how often they were
resumed). The first to come finds no word with that key and takes the epoch after the highest; the
others find its word or come to the same number by themselves. One word is one aligned store, so no
lock is needed.

Cost: 8 KiB. The page has no name and leaves nothing behind.
"""

from __future__ import annotations

import multiprocessing.context
from hashlib import blake2b
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np

from streampack.plan.state import MAX_EPOCH
from streampack.types import Int64Array

__all__ = ["MAX_EPOCH", "EpochLedger"]

MAX_WORKERS = 1000
NEXT, RUN = 0, 1  # words before the workers': the epoch to begin with, and what `run` holds
NUM_RUN = 6
HEAD = RUN + NUM_RUN
EPOCH_BITS = 31  # MAX_EPOCH + 1 fits


class EpochLedger:
    """The epoch of every iteration over a dataset, in this process and in its workers.

    >>> ledger = EpochLedger()
    >>> [ledger.begin(0, "first"), ledger.begin(1, "first"), ledger.begin(1, "second")]
    [0, 0, 1]
    """

    def __init__(self) -> None:
        self._words: Any = RawArray("q", HEAD + MAX_WORKERS)

    def __getstate__(self) -> Any:
        # Only a worker that is being started may share the page; any other copy gets its own.
        if multiprocessing.context.get_spawning_popen() is not None:
            return self._words
        return self._view.tolist()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, list):
            self._words = RawArray("q", state)
        else:
            self._words = state

    @property
    def _view(self) -> Int64Array:
        return np.frombuffer(self._words, np.int64)

    @property
    def has_begun(self) -> bool:
        """Whether any iteration began since the epoch was last set."""
        return bool(self._view[HEAD:].any())

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration will be."""
        epochs = self._view[HEAD:] & ((1 << EPOCH_BITS) - 1)
        return int(max(epochs.max(), self._view[NEXT]))

    @property
    def run(self) -> list[int]:
        """Six integers that workers should know, such as where to resume."""
        return [int(word) for word in self._view[RUN:HEAD]]

    @run.setter
    def run(self, values: list[int]) -> None:
        self._view[RUN:HEAD] = values

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        self._view[HEAD:] = 0
        self._view[NEXT] = epoch

    def begin(self, worker: int, key: str, epoch: int | None = None) -> int:
        """Begin an iteration and return its epoch.

        Args:
            worker: Which worker of the iteration this is; 0 where there are none.
            key: The same in all workers of the iteration, and in no other iteration.
            epoch: Say which epoch it is, instead of asking.
        """
        tag = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little") | 1
        if epoch is None:
            # Looked at once: another worker may write its word between two looks.
            words = self._view[HEAD:].copy()
            is_same = (words >> EPOCH_BITS) == tag
            epochs = words & ((1 << EPOCH_BITS) - 1)
            if is_same[worker]:
                # A worker begins an iteration once: the seed was set back, so this is the next.
                epoch = int(epochs[worker])
            elif is_same.any():
                epoch = int(epochs[is_same][0]) - 1
            else:
                epoch = int(max(epochs.max(), self._view[NEXT]))
        self._view[HEAD + worker] = (tag << EPOCH_BITS) | (epoch + 1)
        return epoch
