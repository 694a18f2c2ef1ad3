"""One worker's part of any source: which items are its own, pass after pass, and the way back.

With 3 parts (workers over all ranks), part 1 of each kind of source::

    list, map-style dataset    0 [1] 2  3 [4] 5  6 [7]      by index, shuffled in blocks if asked
    generator, iterable        a [b] c  d [e] f  g [h]      every third item, the others are skipped
    shards itself             [x] [y] [z]                   whatever it gives here is its own

MosaicML's `StreamingDataset` splits itself over ranks and workers; Hugging Face's `IterableDataset`
over workers, and is asked to over ranks; ``sharded=True`` says the same of any other source.

A place in a part is (pass, taken): taken items of that pass came before. To go back to one, sources
with an index jump; those with `state_dict` and `load_state_dict` are put to the last of their
states before it; all others begin the pass again and skip.

Cost: one call of the source's own iterator an item; every 64 items that are not skipped a state of
sources that have one. Memory: a shuffled block's numbers, those states.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from streampack.config import SHUFFLE_BLOCK_SIZE
from streampack.errors import ConfigError, DataError
from streampack.rng import permutation
from streampack.streams.source_kinds import (
    forgets_its_buffer,
    has_index,
    is_hugging_face,
    is_mosaic,
    is_one_shot,
    num_items,
    reads_many,
)
from streampack.types import Int64Array, State

__all__ = ["Item", "PartPlace", "SourcePart"]

STATE_EVERY = 64  # items between two states of a source that has them
READ_AHEAD = 16  # rows of a dataset that reads many at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """Which part of all."""

    device: int = 0
    """Which of the ranks that get batches of their own."""
    num_devices: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def part(self) -> int:
        """Which part, over all ranks and workers."""
        return self.device * self.num_workers + self.worker

    @property
    def num_parts(self) -> int:
        """All parts."""
        return self.num_devices * self.num_workers

    def num_of(self, total: int) -> int:
        """Return how many of `total` items in turn are this part's.

        >>> [PartPlace(worker=worker, num_workers=3).num_of(8) for worker in range(3)]
        [3, 3, 2]
        """
        return -(-max(total - self.part, 0) // self.num_parts)


class Item(NamedTuple):
    """What a source gave; a tuple, because one is made for every sample."""

    pass_: int
    """In which pass through the source."""
    taken: int
    """Items of this part that came before it in that pass."""
    number: int
    """What the batch calls it: its place in the source, where that is known."""
    value: Any
    """The item; or the failure to get it, where the next one can be had all the same."""


class SourcePart:
    """The items of one part of a source, from any place on, with a way back to earlier ones.

    Args:
        source: Any iterable.
        name: What messages call it.
        place: Which part.
        sharded: The source gives this worker nothing but its own items.
        replay: Never use the source's own state.
        shuffle: Seed, number of the stream and block size to shuffle by; None: as it comes.

    >>> part = SourcePart("abcdefgh", "letters", PartPlace(worker=1, num_workers=3))
    >>> part.begin(0)
    >>> [(item.number, item.value) for item in iter(part.next, None)]
    [(1, 'b'), (4, 'e'), (7, 'h')]
    """

    def __init__(
        self,
        source: Iterable[Any],
        name: str,
        place: PartPlace,
        *,
        sharded: bool = False,
        replay: bool = False,
        shuffle: tuple[int, int, int] | None = None,
    ) -> None:
        self._name = name
        self._place = place
        self.is_first = place.part == 0
        self._part, self._num_parts = place.part, place.num_parts
        self.source = source
        self._source = source
        self._splits_itself = sharded or is_mosaic(source) or is_hugging_face(source)
        if (
            is_hugging_face(source)
            and not sharded
            and getattr(source, "_distributed", None) is None
        ):
            split = import_module("datasets.distributed").split_dataset_by_node
            self._source = split(source, rank=place.device, world_size=place.num_devices)
        self.has_index = has_index(source) and not self._splits_itself
        self._shuffle = shuffle if self.has_index else None
        self._reads_ahead = self.has_index and reads_many(source)
        self._ahead: dict[int, Any] = {}  # items that were read already
        self._block: tuple[tuple[int, int], Int64Array] | None = None
        own_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        # A StreamingDataset's state is a count over all workers, as if they kept step.
        self._has_state = (
            own_state
            and not (replay or self.has_index or is_mosaic(source))
            and not forgets_its_buffer(source)
        )
        self._keeps = self._has_state  # a state, every so many items
        self._has_begun = False
        self._is_put = False  # where a state of its own said, and stays there
        self._items: Iterator[Any] = iter(())
        self.pass_, self.taken = 0, 0
        self._num_raw = 0  # items of the source's own iterator in this pass
        self._counted: int | None = None
        # states: (pass, taken, num_raw, the source's own state).
        self._states: deque[tuple[int, int, int, Any]] = deque()

    @property
    def num_items(self) -> int | None:
        """Items of this part in a pass; None if nobody knows before it was gone through."""
        total = None if self._splits_itself else num_items(self._source)
        return None if total is None else self._place.num_of(total)

    @property
    def num_parts(self) -> int:
        """All parts; the nth item of part p is called nth * num_parts + p."""
        return self._place.num_parts

    def count(self) -> int:
        """Return the items of this part, by going through it, once ever, if need be."""
        known = self.num_items
        if known is not None:
            return known
        if self._counted is None:
            self.begin(0)
            self._skip(None)
            self._counted = self.taken
        return self._counted

    def begin(self, pass_: int, taken: int = 0) -> None:
        """Go to a place: `taken` items into a pass.

        Raises:
            DataError: If the source can be iterated only once and was.
        """
        self._states.clear()
        self._start(pass_)
        if self.has_index:
            self.taken = taken
            return
        self._skip(taken)
        if self._has_state and self.taken == taken > 0:
            self._keep_state()

    def _skip(self, taken: int | None) -> None:
        """Go on until so many items were taken; None: to the end of the pass."""
        # States on the way are asked for by nobody, and each is a copy.
        self._keeps = False
        try:
            while self.taken != taken and self.next() is not None:
                pass
        finally:
            self._keeps = self._has_state

    def _start(self, pass_: int) -> None:
        self.check_not_used_up(pass_)
        self.pass_, self.taken, self._num_raw = pass_, 0, 0
        self._has_begun = True
        self._ahead = {}
        if self.has_index:
            return
        self._set_pass(pass_)
        if self._is_put:
            # Hugging Face's begin every pass of that number where they were put.
            self._source.load_state_dict(None)  # type: ignore[attr-defined]
            self._is_put = False
        try:
            self._items = iter(self._source)
        except Exception as error:
            raise self._failure(error) from error

    def check_not_used_up(self, pass_: int) -> None:
        """Refuse to begin a source again that goes on where it was left."""
        if self._has_begun and is_one_shot(self._source):
            raise DataError(
                f"stream {self._name!r}: its source ({type(self._source).__name__}) can be "
                f"iterated only once and was, so epoch {pass_} would lack its samples; pass "
                "something that can be iterated again: a list, a dataset, or an object whose "
                "__iter__ makes a new generator"
            )

    def _set_pass(self, pass_: int) -> None:
        """Tell a source that shuffles by epoch which one begins."""
        if is_mosaic(self._source):
            # All workers write the same number before the barrier that they meet at.
            self._source.next_epoch = pass_  # type: ignore[attr-defined]
        elif hasattr(self._source, "set_epoch"):
            self._source.set_epoch(pass_)

    def next(self) -> Item | None:
        """Return the next item of the pass; None at its end.

        Raises:
            DataError: If the source's iterator raised; it names the sample.
        """
        if self.has_index:
            total = len(self._source)  # type: ignore[arg-type]
            nth = self.taken * self._num_parts + self._part
            if nth >= total:
                return None
            number = nth if self._shuffle is None else self._index(nth, total)
            self.taken += 1
            if self._reads_ahead:
                self._read_ahead(nth, number, total)
            return self.get(self.pass_, self.taken - 1, number)
        if self._keeps and self.taken and self.taken % STATE_EVERY == 0:
            self._keep_state()
        part, num_parts = self._part, self._num_parts
        while True:
            try:
                value = next(self._items)
            except StopIteration:
                return None
            except Exception as error:
                raise self._failure(error) from error
            self._num_raw += 1
            if self._splits_itself or (self._num_raw - 1) % num_parts == part:
                break
        self.taken += 1
        taken = self.taken - 1
        return Item(self.pass_, taken, taken * num_parts + part, value)

    def _read_ahead(self, nth: int, number: int, total: int) -> None:
        """Read item `number`, the `nth` of the pass, and some after it, unless that was done."""
        if number in self._ahead:
            return
        last = min(nth + READ_AHEAD * self._num_parts, total)
        if self._shuffle is not None:  # the numbers of one block are there
            last = min(last, (nth // self._shuffle[2] + 1) * self._shuffle[2])
        nths = range(nth, last, self._num_parts)
        numbers = [n if self._shuffle is None else self._index(n, total) for n in nths]
        try:
            values = self._source.__getitems__(numbers)  # type: ignore[attr-defined]
        except Exception:  # one of them: which one, is told when each is read alone
            values = []
        self._ahead = dict(zip(numbers, values, strict=False))

    def get(self, pass_: int, taken: int, number: int) -> Item:
        """Return item `number` of a source with an index, or the failure to get it."""
        try:
            is_there = number in self._ahead
            value = self._ahead.pop(number) if is_there else self._source[number]  # type: ignore[index]
        except Exception as error:
            value = self._failure(error, number)
        return Item(pass_, taken, number, value)

    def _index(self, nth: int, total: int) -> int:
        """Return the index of the `nth` item of a shuffled pass."""
        seed, stream, size = self._shuffle or (0, 0, SHUFFLE_BLOCK_SIZE)
        num_blocks = -(-total // size)
        # The last block may be short, so it stays last; the others change places.
        slot, at = divmod(nth, size)
        key = (self.pass_, slot)
        if self._block is None or self._block[0] != key:
            block = slot
            if slot < num_blocks - 1:
                block = int(permutation(num_blocks - 1, seed, "blocks", stream, self.pass_)[slot])
            length = min(size, total - block * size)
            order = permutation(length, seed, "items", stream, self.pass_, slot) + block * size
            self._block = (key, order)
        return int(self._block[1][at])

    def _failure(self, error: Exception, number: int | None = None) -> DataError:
        if number is None:
            place = self._place
            number = self.taken * place.num_parts + place.part
        return DataError(
            f"stream {self._name!r}: its source ({type(self._source).__name__}) raised "
            f"{type(error).__name__}: {error}, instead of giving sample {number}"
        )

    @property
    def gave_nothing(self) -> bool:
        """Whether the pass is known to hold no item for anybody."""
        if self.has_index:
            return num_items(self._source) == 0
        return self._num_raw == 0 and not self._splits_itself

    # The way back.

    def _keep_state(self) -> None:
        if self._states and self._states[-1][:2] == (self.pass_, self.taken):
            return  # put there just now: it may know its place only once it has given an item
        # Copies, here and where it is loaded: a source may hand over what it goes on to change.
        state = copy.deepcopy(self._source.state_dict())  # type: ignore[attr-defined]
        self._states.append((self.pass_, self.taken, self._num_raw, state))

    def base(self, pass_: int, taken: int) -> State:
        """Return from where a place can be reached again, as JSON (beside the source's own state).

        Args:
            pass_: Of the earliest item that may be asked for again.
            taken: Likewise. Earlier states are forgotten.
        """
        while len(self._states) > 1 and self._states[1][:2] <= (pass_, taken):
            self._states.popleft()
        if self._states and self._states[0][:2] <= (pass_, taken):
            at_pass, at_taken, num_raw, state = self._states[0]
            return {"pass": at_pass, "taken": at_taken, "raw": num_raw, "source": state}
        return {"pass": pass_, "taken": 0}

    def resume(self, base: State) -> None:
        """Go to what `base` returned.

        Raises:
            ConfigError: If it holds a state of the source, which has none here.
        """
        if "source" not in base:
            self.begin(int(base["pass"]))
            return
        if not self._has_state:
            raise ConfigError(
                f"stream {self._name!r}: the state holds one of its source's own, but "
                f"{type(self._source).__name__} has no load_state_dict (or replay=True is set); "
                "pass the source that was saved"
            )
        self._set_pass(int(base["pass"]))
        self._source.load_state_dict(copy.deepcopy(base["source"]))  # type: ignore[attr-defined]
        self._is_put = is_hugging_face(self._source)
        self._has_begun = True
        self._items = iter(self._source)
        self.pass_, self.taken = int(base["pass"]), int(base["taken"])
        self._num_raw = int(base["raw"])
        self._states.clear()
        self._states.append((self.pass_, self.taken, self._num_raw, base["source"]))
