"""Two tiers: short samples in short packs, and those as blocks in the rows of the long ones.

With short_seq_len=4, max_seq_len=16 and segments in arrival order::

    arrival    A9  b2  c3  d2  e1  f1
    blocks     [b b d d]  [c c c e]             shorts fill packs of 4, whole
    row        A A A A A A A A A b b d d f . .  A and a block leave 3 tokens: more shorts, whole

An exact fit at `short_seq_len` packs what is no longer than that. What it makes goes, with the
longer segments, through a second exact fit at `max_seq_len`, as one item each. The room that a row
then leaves, less than a block, is filled with shorts that are still waiting. So a short sample lies
in a run of whole samples of at most `short_seq_len` tokens, which needs no context parallelism.

The tiers feed each other, so they work in turns: shorts are collected until there are 64, or a
longer segment comes.

Cost: 4 us a sample where most are short, 45 us where many are long: ten to a hundred times that of
one exact fit. Fill: 99.9 % on web text. Memory: as one exact fit, whose bound the tiers share.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from streampack.config import BUFFER_PACKS, Packing
from streampack.errors import ResumeError
from streampack.pack import kernels
from streampack.pack.buffered import BufferedPacker, KernelPacker, rooms
from streampack.pack.kernels import NO_LIMIT, Limits
from streampack.pack.limits import limits_of
from streampack.types import (
    LENGTH,
    NUM_COLUMNS,
    SAMPLE,
    TOTAL,
    Int64Array,
    Packs,
    State,
    no_segments,
)

__all__ = ["TwoTiersPacker", "two_tiers"]

TURN_SAMPLES = 64


class _Pool(KernelPacker):
    """An exact fit that also gives of its buffer when it is asked."""

    def __init__(self, limits: Limits):
        super().__init__("exact_fit", limits, kernels.exact_fit)

    def close_oldest(self) -> Packs:
        """Return a pack of what is buffered, the oldest segment in it."""
        return self._run(no_segments(), partial(kernels.close_oldest, self._limits))

    def take(self, room: int) -> Int64Array:
        """Return buffered segments that fill `room` tokens best, shape (n, 6)."""
        if not len(self._buffered):
            return no_segments()
        return self._run(
            no_segments(), partial(kernels.fill_room, self._limits, room=room)
        ).segments

    @property
    def buffered(self) -> Int64Array:
        """What is buffered, the oldest first, shape (n, 6)."""
        return self._buffered


class TwoTiersPacker(BufferedPacker):
    """Two exact fits, one over the other."""

    def __init__(self, limits: Limits, short_seq_len: int):
        super().__init__("two_tiers", limits)
        tokens = min(BUFFER_PACKS * short_seq_len, limits.buffer_tokens - limits.max_seq_len)
        short_tokens = max(short_seq_len, tokens // 2)
        self._turn_tokens = tokens - short_tokens
        self._short_seq_len = short_seq_len
        self._short = _Pool(
            limits._replace(
                max_seq_len=short_seq_len,
                buffer_tokens=short_tokens,
                window=min(short_seq_len, limits.window),
                tolerance=short_seq_len // 1000,
                split_gap=short_seq_len,
            )
        )
        # A gap below a block is as good as none: shorts will fill it.
        self._long = _Pool(
            limits._replace(
                buffer_tokens=limits.buffer_tokens - tokens,
                buffer_samples=NO_LIMIT,
                tolerance=short_seq_len,
            )
        )
        self._items: dict[int, Int64Array] = {}  # the segments of what the long tier buffers
        self._num_items = 0  # that ever were: the next one's number
        self._num_samples = 0  # in the items
        self._turn: list[Int64Array] = []  # shorts that are collected, while rows are being taken
        self._tokens_in_turn = 0

    @property
    def num_buffered_tokens(self) -> int:
        """Tokens in the buffer now, with the padding of `pad_to_multiple`."""
        tiers = self._short.num_buffered_tokens + self._long.num_buffered_tokens
        return super().num_buffered_tokens + tiers

    @property
    def num_buffered_samples(self) -> int:
        """Segments in the buffer now."""
        return len(self._buffered) + self._short.num_buffered_samples + self._num_samples

    @property
    def high_water_tokens(self) -> int:
        """The most that each tier, and what is collected for it, ever buffered: all together."""
        tiers = self._short.high_water_tokens + self._long.high_water_tokens
        return self._high_water[0] + tiers

    def state_dict(self) -> State:
        """Return what is buffered, as plain integers: addresses, no tokens."""
        items = self._long.buffered[:, SAMPLE].tolist()
        return {
            **super().state_dict(),
            "short": self._short.state_dict(),
            "items": [self._items[item].tolist() for item in items],
            "high_water_long": self._long.high_water_tokens,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of a packer with the same packing.

        Raises:
            ResumeError: If the state is another method's, or holds what this buffer cannot.
        """
        super().load_state_dict(state)
        self._short.load_state_dict(state["short"])
        items = [np.array(item, np.int64).reshape(-1, NUM_COLUMNS) for item in state["items"]]
        self._items, self._num_samples = {}, 0
        rows = self._numbered(items).tolist()
        high_water = [state["high_water_long"], len(items)]
        self._long.load_state_dict(
            {"method": "exact_fit", "buffered": rows, "high_water": high_water}
        )
        if self.num_buffered_samples > self._limits.buffer_samples:
            raise ResumeError(
                f"the state buffers {self.num_buffered_samples} samples, more than buffer_samples="
                f"{self._limits.buffer_samples}; resume with the packing that was saved"
            )

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        made: list[Packs] = []
        # Rows come one by one, so what is collected is a list until they are all there.
        self._turn = list(self._buffered)
        self._tokens_in_turn = super().num_buffered_tokens
        for segment, length in zip(
            segments, rooms(segments, self._limits.multiple)[:, LENGTH].tolist(), strict=True
        ):
            self._take(segment, length, made)
        if final:
            self._end_turn(made)
            self._add_items(_parts(self._short.flush()), made)
            made.append(self._rows(self._long.flush()))
        self._buffered = np.array(self._turn, np.int64).reshape(-1, NUM_COLUMNS)
        self._waited = np.zeros(len(self._turn), np.int64)
        return Packs.join(made)

    def _take(self, segment: Int64Array, length: int, made: list[Packs]) -> None:
        """Take one segment; append the rows that it completes to `made`."""
        if self._num_held >= self._limits.buffer_samples:
            self._end_turn(made)
            self._make_room(made)
        fits = self._tokens_in_turn + length <= self._turn_tokens
        if length > self._short_seq_len or not fits:
            self._end_turn(made)
        if length > self._short_seq_len:
            self._add_items([segment[None]], made)
        else:
            self._turn.append(segment)
            self._tokens_in_turn += length
            if len(self._turn) == TURN_SAMPLES or length > self._turn_tokens:
                self._end_turn(made)
        tokens, samples = self._high_water
        self._high_water = (max(tokens, self._tokens_in_turn), max(samples, self._num_held))

    @property
    def _num_held(self) -> int:
        """Segments in the buffer while rows are being taken."""
        return len(self._turn) + self._short.num_buffered_samples + self._num_samples

    def _make_room(self, made: list[Packs]) -> None:
        """Close rows until one more segment may be buffered."""
        while self._num_held >= self._limits.buffer_samples:
            if self._items:
                made.append(self._rows(self._long.close_oldest()))
            else:
                self._add_items(_parts(self._short.close_oldest()), made)

    def _end_turn(self, made: list[Packs]) -> None:
        """Hand what was collected to the short tier, and its blocks to the long one."""
        if self._turn:
            blocks = self._short.add(np.array(self._turn))
            self._turn, self._tokens_in_turn = [], 0
            self._add_items(_parts(blocks), made)

    def _add_items(self, items: list[Int64Array], made: list[Packs]) -> None:
        made.append(self._rows(self._long.add(self._numbered(items))))

    def _numbered(self, items: list[Int64Array]) -> Int64Array:
        """Keep items, and return the rows that stand for them in the long tier, shape (n, 6)."""
        numbered = np.zeros((len(items), NUM_COLUMNS), np.int64)
        for row, item in zip(numbered, items, strict=True):
            row[SAMPLE] = self._num_items
            row[[LENGTH, TOTAL]] = rooms(item, self._limits.multiple)[:, LENGTH].sum()
            self._items[self._num_items] = item
            self._num_items += 1
            self._num_samples += len(item)
        return numbered

    def _rows(self, packs: Packs) -> Packs:
        """Return packs of the long tier with the segments of their items, and shorts behind."""
        rows = []
        for number in range(len(packs)):
            items = packs[number]
            room = self._limits.max_seq_len - int(items[:, LENGTH].sum())
            parts = [self._items.pop(item) for item in items[:, SAMPLE].tolist()]
            self._num_samples -= sum(map(len, parts))
            rows.append(np.concatenate([*parts, self._short.take(room)]))
        return Packs(
            segments=np.concatenate([no_segments(), *rows]),
            ends=np.cumsum([len(row) for row in rows], dtype=np.int64),
        )


def _parts(packs: Packs) -> list[Int64Array]:
    return [packs[number] for number in range(len(packs))]


def two_tiers(packing: Packing) -> TwoTiersPacker:
    """Return a packer of short packs within long rows.

    >>> packer = two_tiers(Packing(max_seq_len=16, method="two_tiers", short_seq_len=4))
    >>> lengths = [9, 2, 3, 2, 1, 1]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packs = Packs.join([packer.add(np.array(rows)), packer.flush()])
    >>> packs[0][:, 2].tolist(), packs[1][:, 2].tolist()
    ([0, 1, 3, 5], [2, 4])
    """
    return TwoTiersPacker(limits_of(packing), packing.short_seq_len or packing.max_seq_len)
