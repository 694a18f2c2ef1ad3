"""One worker's slice of a source: its items in each pass, and resuming at a position.

With 3 slices (workers over all ranks), slice 1 of each kind of source::

    list, map-style dataset    0 [1] 2  3 [4] 5  6 [7]      by index, optionally shuffled in blocks
    generator, iterable        a [b] c  d [e] f  g [h]      every third item, the others are skipped
    shards itself             [x] [y] [z]                   all items that it gives to this worker

What a generator or iterable is told that asks torch which worker it is in::

    sharded=None     its worker, and is then refused: most of its items would never come
    sharded=False    none

A position in a slice is (pass, taken), where taken counts the items before it in that pass.
docs/iterables.md shows which sources shard themselves, and how each resumes at a position.

Cost: one call of the source's own iterator per item, and one source state every 64 items that are
not skipped. Memory: the indices of a shuffled block, and those states.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.rng import permutation
from streampack.runtime import torch_worker
from streampack.texts.source_traits import (
    has_index,
    has_unsaved_shuffle_buffer,
    is_hugging_face,
    is_mosaic,
    is_one_shot,
    num_items,
    supports_batched_getitem,
)
from streampack.types import Int64Array

STATE_EVERY = 64  # items between two states of a source
MOST_EMPTY_PASSES = 100
TABLE_ROWS = 16  # of a Hugging Face table, read together
LEFT = "a later iteration of this dataset has begun"

Own: TypeAlias = Callable[[Any], tuple[Any, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlice:
    """One worker's position among all ranks and workers."""

    device: int = 0
    """Number of the rank, among those that get distinct batches."""
    num_devices: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def index(self) -> int:
        """Number of this slice, over all ranks and workers."""
        return self.device * self.num_workers + self.worker

    @property
    def num_slices(self) -> int:
        return self.num_devices * self.num_workers

    def num_of(self, total: int) -> int:
        """Return this slice's share of `total` items dealt round-robin.

        >>> [WorkerSlice(worker=worker, num_workers=3).num_of(8) for worker in range(3)]
        [3, 3, 2]
        """
        return -(-max(total - self.index, 0) // self.num_slices)


def most_empty_passes(source: object, *, is_sharded: bool) -> int:
    """Return after how many passes without an item, one after the other, a slice counts as empty.

    Hugging Face's iterables divide their shards among workers differently in each pass. So a worker
    may get only shards without samples in one pass, and others in the next.

    >>> most_empty_passes([1, 2], is_sharded=False)
    1
    """
    is_divided_again = (is_sharded or is_hugging_face(source)) and hasattr(source, "set_epoch")
    return MOST_EMPTY_PASSES if is_divided_again else 1


class Items(NamedTuple):
    """Consecutive items of a slice."""

    pass_: int
    """Number of the pass through the source."""
    taken: int
    """Items of this slice before the first of these in that pass."""
    numbers: Sequence[int]
    """Their numbers in batches: their indices in the source, if those are known."""
    values: list[Any]
    """The items, or the errors of reading them if the following items can still be read."""


class SourceSlice:
    """The items of one slice of a source, readable again from any earlier position.

    A `sharded` source gives each worker only that worker's items. With `replay`, the source's own
    state is never used. `shuffle` contains seed, stream number and block size, or is None.

    >>> letters = SourceSlice("abcdefgh", "letters", WorkerSlice(worker=1, num_workers=3))
    >>> letters.begin(0)
    >>> [(*items.numbers, *items.values) for items in iter(letters.read, None)]
    [(1, 'b'), (4, 'e'), (7, 'h')]
    """

    def __init__(
        self,
        source: Any,
        name: str,
        worker_slice: WorkerSlice,
        *,
        sharded: bool | None = None,
        replay: bool = False,
        shuffle: tuple[int, int, int] | None = None,
    ) -> None:
        self.name = name
        self.worker_slice = worker_slice
        self.has_warned = False  # whether the end-of-stream warning was logged
        self.is_left = False
        """Whether a later iteration has begun: the thread that reads for this one ends."""
        self._index, self._num_slices = worker_slice.index, worker_slice.num_slices
        self.source = source
        self._replay = replay
        self._source: Any = source
        self._sharded = sharded
        from_hub, self._is_mosaic = is_hugging_face(source), is_mosaic(source)
        self._splits_itself = bool(sharded) or self._is_mosaic or from_hub
        if from_hub:
            # Workers would share the epoch, which is in torch's shared memory. Not copy.copy, whose
            # result would have the same __dict__.
            self._source = object.__new__(type(source))
            self._source.__dict__ = source.__dict__ | {"_epoch": 0}
        # Not for one rank: a concatenation that was split cannot load its state in workers.
        has_others = worker_slice.num_devices > 1 and getattr(source, "_distributed", None) is None
        if from_hub and not sharded and has_others:
            split = import_module("datasets.distributed").split_dataset_by_node
            self._source = split(
                source, rank=worker_slice.device, world_size=worker_slice.num_devices
            )
        self.most_empty_passes = most_empty_passes(source, is_sharded=bool(sharded))
        self.has_index = has_index(source) and not self._splits_itself
        self._shuffle = shuffle if self.has_index else None
        self._reads_batches = self.has_index and supports_batched_getitem(source)
        self.is_list = self.has_index and type(source) in (list, tuple)
        """Whether all items are in memory already, and stay as they are."""
        self._block: tuple[tuple[int, int], Int64Array] | None = None
        own_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        # A StreamingDataset's state counts over all workers as if they advanced in step.
        self._has_state = (
            own_state
            and not (replay or self.has_index or self._is_mosaic)
            and not has_unsaved_shuffle_buffer(source)
        )
        self._has_begun = False
        self._is_put = False  # whether the source has a loaded state that must be cleared
        self._items: Iterator[Any] = iter(())
        self.pass_, self.taken = 0, 0
        self._num_raw = 0  # items of the source's own iterator in this pass
        self._error: DataError | None = None  # of the iterator, behind the items last read
        self._counted: tuple[int, int | None] | None = None
        # states: (pass, taken, num_raw, the source's own state).
        self._states: deque[tuple[int, int, int, Any]] = deque()

    @property
    def total(self) -> int | None:
        """Items of all slices per pass; None if unknown: it has no length, or shards itself."""
        return None if self._splits_itself else num_items(self._source)

    @property
    def indexed_size(self) -> int | None:
        """Length of an indexed source, which must not change: its samples would be renumbered."""
        return len(self._source) if self.has_index else None

    def count(self) -> tuple[int, int | None]:
        """Return the items per pass of this slice, and of all slices if it can see them.

        If unknown, the source is read through once.
        """
        if (total := self.total) is not None:
            return self.worker_slice.num_of(total), total
        if self._counted is None:
            self.begin(0)
            with self._watched():
                self._skip(None)
            self._counted = self.taken, None if self._splits_itself else self._num_raw
        return self._counted

    def begin(self, pass_: int, taken: int = 0, base: Sequence[Any] | None = None) -> None:
        """Go to a position, from an earlier state of the source's own if there is one."""
        if self._replay or base is None:
            base = None
            self.check_not_used_up(pass_)
        elif not self._has_state:
            raise ConfigError(
                f"stream {self.name!r}: the state contains a state of its source, but "
                f"{type(self._source).__name__} has no load_state_dict; pass the source that was "
                "saved, or set replay=True to read it up to the position"
            )
        at_pass, at_taken, num_raw, state = base or (pass_, 0, 0, None)
        self._states.clear()
        self._error = None
        self.pass_, self.taken, self._num_raw = int(at_pass), int(at_taken), int(num_raw)
        self._has_begun = True
        if self.has_index:
            self.taken = taken
            return
        self._set_pass(self.pass_)
        if base is not None or self._is_put:
            # Without a state, too: a Hugging Face dataset would start every pass at the loaded one.
            self._source.load_state_dict(copy.deepcopy(state))
            self._is_put = base is not None and is_hugging_face(self._source)
        if base is not None:
            self._states.append((self.pass_, self.taken, self._num_raw, state))
        with self._watched():
            try:
                self._items = iter(self._source)
            except Exception as error:
                raise self._failure(error) from error
            self._skip(taken)
        if base is None and self._has_state and self.taken == taken > 0:
            self._keep_state()

    def _skip(self, taken: int | None) -> None:
        """Skip until `taken` items were taken, or to the end of the pass."""
        # No states on the way: each is a copy, and none of them is needed.
        try:
            while self.taken != taken:
                self._next()
        except StopIteration:
            return
        except Exception as error:
            raise self._failure(error) from error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Let the source run; one that asks for its worker is refused if its items are dealt."""
        if self._splits_itself or self.worker_slice.num_workers == 1:
            yield
            return
        with torch_worker.watch_asking(is_hidden=self._sharded is not None) as was_asked:
            yield
        if was_asked():
            raise ConfigError(
                f"stream {self.name!r}: its source ({type(self._source).__name__}) asks which of "
                f"{torch_worker.worker_here().num_workers} workers it is in, while its items are "
                "divided among them already, so most would never come; set sharded=True if it "
                "gives each worker of each rank its own samples, or sharded=False if all of them "
                "are to be divided"
            )

    def check_not_used_up(self, pass_: int) -> None:
        if self._has_begun and is_one_shot(self._source):
            raise DataError(
                f"stream {self.name!r}: its source ({type(self._source).__name__}) can be "
                f"iterated only once, and has been, so epoch {pass_} would lack its samples; pass "
                "something that can be iterated again: a list, a dataset, or an object with an "
                "__iter__ that makes a new generator"
            )

    def _set_pass(self, pass_: int) -> None:
        if self._is_mosaic:
            # All workers write the same number before they meet at its barrier.
            self._source.next_epoch = pass_
        elif hasattr(self._source, "set_epoch"):
            self._source.set_epoch(pass_)

    def read(self, most: int = 1, *, enough: float = 1, own: Own | None = None) -> Items | None:
        """Return the next items of the pass; None at its end.

        There are up to `most`, and none after the sizes of those before add up to `enough`. `own`
        returns an item that shares no memory with objects that the source may reuse, and its size.
        If the iterator raises, the items before that come first, then a DataError that names the
        sample.
        """
        if self.has_index:
            return self._read_by_index(most, enough, own)
        if self._error is not None:
            raise self._error
        with self._watched():
            return self._read_next(most, enough, own)

    def _read_next(self, most: int, enough: float, own: Own | None) -> Items | None:
        first, values, size = self.taken, list[Any](), 0
        while len(values) < most and size < enough:
            if self._has_state and self.taken and self.taken % STATE_EVERY == 0:
                self._keep_state()
            try:
                value = self._next()
            except StopIteration:
                break
            except Exception as error:
                self._error = self._failure(error)
                self._error.__cause__ = error
                if not values:
                    raise self._error from error
                break
            if own is not None:
                value, more = own(value)
                size += more
            values.append(value)
        if not values:
            return None
        numbers = range(first * self._num_slices + self._index, 2**63, self._num_slices)
        return Items(self.pass_, first, numbers[: len(values)], values)

    def _next(self) -> Any:
        while True:
            if self.is_left:
                raise DataError(LEFT)
            value = next(self._items)
            self._num_raw += 1
            if self._splits_itself or (self._num_raw - 1) % self._num_slices == self._index:
                self.taken += 1
                return value

    def _read_by_index(self, most: int, enough: float, own: Own | None) -> Items | None:
        total, step = len(self._source), self._num_slices
        first = self.taken * step + self._index
        if first >= total:
            return None
        if self._reads_batches:
            most = min(most, TABLE_ROWS)
        nths = range(first, min(first + most * step, total), step)
        numbers: Sequence[int] = nths
        if self._shuffle is not None:
            slot, offset = divmod(first, self._shuffle[2])
            order = self._order_of(self._shuffle, slot, total)
            numbers = order[offset::step][: len(nths)].tolist()
        values = self._together(numbers)
        if values is None:
            values, size = [], 0
            for number in numbers:
                if self.is_left:
                    raise DataError(LEFT)
                value = self.get(number)
                if own is not None:
                    value, more = own(value)
                    size += more
                values.append(value)
                if size >= enough:
                    break
        taken, self.taken = self.taken, self.taken + len(values)
        return Items(self.pass_, taken, numbers[: len(values)], values)

    def _together(self, numbers: Sequence[int]) -> list[Any] | None:
        """Return items that are read in one step, or None to read them one by one."""
        if self.is_list and isinstance(self._source[numbers[0]], np.ndarray):
            return list(map(self._source.__getitem__, numbers))
        if self._reads_batches and len(numbers) > 1:
            with suppress(Exception):  # reading them one by one finds the item that fails
                values = list(self._source.__getitems__(list(numbers)))
                if len(values) == len(numbers):
                    return values
        return None

    def get(self, number: int) -> Any:
        """Return item `number` of an indexed source, or the error of reading it."""
        try:
            return self._source[number]
        except Exception as error:
            return self._failure(error, number)

    def _order_of(self, shuffle: tuple[int, int, int], slot: int, total: int) -> Int64Array:
        seed, stream, size = shuffle
        num_blocks = -(-total // size)
        key = (self.pass_, slot)
        if self._block is None or self._block[0] != key:
            block = slot
            # The last block may be short, so it stays last; the others are permuted.
            if slot < num_blocks - 1:
                block = int(permutation(num_blocks - 1, seed, "blocks", stream, self.pass_)[slot])
            length = min(size, total - block * size)
            order = permutation(length, seed, "items", stream, self.pass_, slot) + block * size
            self._block = (key, order)
        return self._block[1]

    def _failure(self, error: Exception, number: int | None = None) -> DataError:
        if number is None:
            number = self.taken * self._num_slices + self._index
        is_resuming = self._is_put and self._states[-1][1] == self.taken
        way_out = "; set replay=True to resume without its own state" if is_resuming else ""
        return DataError(
            f"stream {self.name!r}: its source ({type(self._source).__name__}) raised "
            f"{type(error).__name__}: {error}, instead of giving sample {number}{way_out}"
        )

    @property
    def is_empty(self) -> bool:
        """Whether the source is known to be empty for all slices."""
        if self.has_index:
            return num_items(self._source) == 0
        return self._num_raw == 0 and not self._splits_itself

    # State.

    def _keep_state(self) -> None:
        if self._states and self._states[-1][:2] == (self.pass_, self.taken):
            return  # just loaded: a source may report a valid state only after its first item
        # Copied on save and on load, because a source may continue to change the object.
        state = copy.deepcopy(self._source.state_dict())
        self._states.append((self.pass_, self.taken, self._num_raw, state))

    def base(self, pass_: int, taken: int) -> list[Any] | None:
        """Return the source's own state before `taken` items of `pass_`, or None if there is none.

        It is the earliest that may be needed: earlier states are dropped.
        """
        while len(self._states) > 1 and self._states[1][:2] <= (pass_, taken):
            self._states.popleft()
        if self._states and self._states[0][:2] <= (pass_, taken):
            return list(self._states[0])
        return None
