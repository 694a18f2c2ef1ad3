"""An epoch counter shared by worker processes that do not communicate otherwise.

torch's DataLoader starts (or resumes) its workers for every epoch without informing the dataset. A
dataset that counted its own iterations would restart at epoch 0 in every new worker. So the count
is kept in a page shared by parent and workers, one word per worker::

    word of worker w     [ key of the iteration : 32 | epoch + 1 : 31 ]

Workers of one iteration know the same key: the loader's base seed, and the number of times they
were resumed. The first worker finds no word with that key and takes the epoch after the highest.
The others find its word, or compute the same number. A word is one aligned store, without a lock.
"""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Sequence
from hashlib import blake2b
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np

from streampack.errors import ConfigError, raise_if_limited
from streampack.types import Int64Array

MAX_WORKERS = 1000
NEXT, RUN = 0, 1  # words before the workers': the next epoch, and the contents of `run`
NUM_RUN = 7
HEAD = RUN + NUM_RUN
EPOCH_BITS = 31  # MAX_EPOCH + 1 fits


def _shared(words: int | list[int]) -> Any:
    try:
        return RawArray("q", words)
    except OSError as error:
        raise_if_limited(error)
        raise ConfigError(
            f"memory that workers share cannot be made ({error}); make /dev/shm writable, or give "
            "it more room (docker: --shm-size)"
        ) from error


class SharedEpochCounter:
    """The epoch of each iteration over a dataset, shared by this process and its workers.

    >>> ledger = SharedEpochCounter()
    >>> [ledger.begin(0, "first"), ledger.begin(1, "first"), ledger.begin(1, "second")]
    [0, 0, 1]
    """

    def __init__(self) -> None:
        self._shared: Any = _shared(HEAD + MAX_WORKERS)
        self.words: Int64Array = np.frombuffer(self._shared, np.int64)
        """The page, as integers."""

    def __getstate__(self) -> Any:
        # Share the page only with a worker that is being started; any other copy gets its own.
        if multiprocessing.context.get_spawning_popen() is not None:
            return self._shared
        return self.words.tolist()

    def __setstate__(self, state: Any) -> None:
        self._shared = _shared(state) if isinstance(state, list) else state
        self.words = np.frombuffer(self._shared, np.int64)

    @property
    def has_begun(self) -> bool:
        """Whether any iteration began since the epoch was last set."""
        return bool(self.words[HEAD:].any())

    @property
    def next_epoch(self) -> int:
        epochs = self.words[HEAD:] & ((1 << EPOCH_BITS) - 1)
        return int(max(epochs.max(), self.words[NEXT]))

    @property
    def run(self) -> list[int]:
        return [int(word) for word in self.words[RUN:HEAD]]

    def word(self, worker: int) -> int:
        return int(self.words[HEAD + worker])

    def put_back(self, worker: int, word: int) -> None:
        """Undo a worker's `begin`, after its iteration failed before the first batch."""
        self.words[HEAD + worker] = word

    def words_at(self, epoch: int, run: Sequence[int] = ()) -> Int64Array:
        """Return the page in which this epoch is next, and no iteration has begun."""
        words = np.zeros_like(self.words)
        words[NEXT], words[RUN : RUN + len(run)] = epoch, run
        return words

    def begin(self, worker: int, key: str, epoch: int | None = None) -> int:
        """Begin an iteration and return its epoch: the next one, unless `epoch` is given.

        `key` is the same in all workers of the iteration, and in no other iteration.
        """
        tag = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little") | 1
        if epoch is None:
            # Read once: another worker may write its word between two reads.
            words = self.words[HEAD:].copy()
            is_same = (words >> EPOCH_BITS) == tag
            epochs = words & ((1 << EPOCH_BITS) - 1)
            if is_same[worker]:
                # A worker begins an iteration only once: the seed was reset, and this is another.
                epoch = int(epochs[worker])
            elif is_same.any():
                epoch = int(epochs[is_same][0]) - 1
            else:
                epoch = int(max(epochs.max(), self.words[NEXT]))
        self.words[HEAD + worker] = (tag << EPOCH_BITS) | (epoch + 1)
        return epoch
