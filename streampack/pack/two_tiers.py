"""Two tiers: short samples are packed into short packs, and those as blocks into long rows.

With short_seq_len=4, max_seq_len=16 and segments in arrival order::

    arrival    A9  b2  c3  d2  e1  f1
    blocks     [b b d d]  [c c c e]             shorts fill packs of 4, whole
    row        A A A A A A A A A b b d d f . .  A and a block leave 3 tokens: more shorts, whole

The short tier is an exact fit at `short_seq_len` for segments up to that length. Its packs and all
longer segments are the items of the long tier, an exact fit at `max_seq_len`. The room left in a
row, less than a block, is filled with waiting shorts.

The tiers feed each other, so they take turns. Shorts are collected until there are 64 of them, or
until a longer segment arrives.

Cost: 0.6 us a sample if most are short, 1.3 us if many are long. Memory: the tiers share a limit.
"""

from __future__ import annotations

import numpy as np

from streampack.config import Packing
from streampack.config.packing import BUFFER_PACKS
from streampack.pack import kernels
from streampack.pack.buffered import (
    TOLERANCE,
    BufferedPacker,
    KernelPacker,
    limits_of,
    rooms,
    without_padding,
)
from streampack.pack.kernels import NO_LIMIT, Tiers
from streampack.types import (
    LENGTH,
    NO_SEGMENTS,
    NUM_COLUMNS,
    SAMPLE,
    TOTAL,
    Int64Array,
    Packs,
    State,
)


class TwoTiersPacker(BufferedPacker):
    """Two exact fits: the short tier's packs are items of the long tier.

    >>> packer = TwoTiersPacker(Packing(max_seq_len=16, method="two_tiers", short_seq_len=4))
    >>> lengths = [9, 2, 3, 2, 1, 1]
    >>> rows = [[0, 0, sample, 0, length, length] for sample, length in enumerate(lengths)]
    >>> packs = Packs.join([packer.add(np.array(rows)), packer.flush()])
    >>> packs[0][:, 2].tolist(), packs[1][:, 2].tolist()
    ([0, 1, 3, 5], [2, 4])
    """

    def __init__(self, packing: Packing):
        limits, short_seq_len = limits_of(packing), packing.short_seq_len or packing.max_seq_len
        super().__init__("two_tiers", limits)
        tokens = min(BUFFER_PACKS * short_seq_len, limits.buffer_tokens - limits.pack_tokens)
        short_tokens = max(short_seq_len, tokens // 2)
        self._turn_tokens = tokens - short_tokens
        self._short_seq_len = short_seq_len
        short = limits._replace(
            pack_tokens=short_seq_len,
            buffer_tokens=short_tokens,
            search_tokens=min(short_seq_len, limits.search_tokens),
            tolerance=short_seq_len // TOLERANCE,
            split_gap=short_seq_len,
        )
        # A gap smaller than a block does not matter: shorts will fill it.
        long = limits._replace(
            buffer_tokens=limits.buffer_tokens - tokens,
            buffer_samples=NO_LIMIT,
            tolerance=short_seq_len,
        )
        self._tier_limits = short, long
        self._short, self._long = (
            KernelPacker("exact_fit", own, kernels.fit_exactly) for own in self._tier_limits
        )
        self._items: list[Int64Array] = []  # segments of each item that the long tier buffers

    @property
    def buffered(self) -> Int64Array:
        """All segment rows in the buffer: of both tiers, and the collected shorts."""
        return np.concatenate([self._buffered, self._short.buffered, *self._items])

    @property
    def held(self) -> tuple[int, int]:
        """Tokens in the buffer, including the padding of `pad_to_multiple`, and segments."""
        (collected, own), (short, shorts) = super().held, self._short.held
        return collected + short + self._long.held[0], own + shorts + sum(map(len, self._items))

    @property
    def high_water(self) -> tuple[int, int]:
        """Sum of the most tokens of each tier and collected for the short tier; most segments."""
        tiers = self._short.high_water[0] + self._long.high_water[0]
        return self._high_water[0] + tiers, self._high_water[1]

    def state_dict(self) -> State:
        """Return the buffer as plain integers: sample addresses, no tokens."""
        return {
            **super().state_dict(),
            "short": self._short.state_dict(),
            "items": [item.tolist() for item in self._items],
            "high_water_long": self._long.high_water[0],
        }

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._short.load_state_dict(state["short"])
        self._items = [np.array(item, np.int64).reshape(-1, NUM_COLUMNS) for item in state["items"]]
        rows = _numbered(self._items, self._limits.multiple).tolist()
        high_water = [state["high_water_long"], len(rows)]
        self._long.load_state_dict(
            {"method": "exact_fit", "buffered": rows, "high_water": high_water}
        )

    def _pack(self, segments: Int64Array, *, final: bool) -> Packs:
        num_rows = self.held[1] + len(segments)
        tiers = self._open(num_rows)
        kernels.fit_tiers(
            tiers,
            np.ascontiguousarray(segments),
            self._turn_tokens,
            self._limits.buffer_samples,
            final,
        )
        self._close(tiers)
        num_out, num_packs = tiers.counts[[kernels.OUT, kernels.ROWS]].tolist()
        return Packs(segments=tiers.out[:num_out].copy(), ends=tiers.ends[:num_packs].copy())

    def _open(self, num_rows: int) -> Tiers:
        # Segments are never cut here, so each one is in at most one item and in one row.
        items, out = np.empty((2, num_rows, NUM_COLUMNS), np.int64)
        spans, ends = np.empty((num_rows, 2), np.int64), np.empty(num_rows, np.int64)
        short, num_short = self._short.open_work(NO_SEGMENTS, num_rows), len(self._short.buffered)
        collected = rooms(self._buffered, self._limits.multiple)
        short.rows[num_short : num_short + len(collected)] = collected
        sizes = np.array([len(item) for item in self._items], np.int64)
        bounds = np.cumsum([0, *sizes])
        items[: bounds[-1]] = np.concatenate([NO_SEGMENTS, *self._items])
        spans[: len(sizes)] = np.stack([bounds[:-1], bounds[1:]], axis=1)
        counts = np.zeros(kernels.NUM_COUNTS, np.int64)
        counts[kernels.TURN], counts[kernels.TURN_TOKENS] = (
            len(collected),
            collected[:, LENGTH].sum(),
        )
        counts[[kernels.HIGH_TURN, kernels.HIGH_HELD]] = self._high_water
        counts[kernels.ITEMS] = len(sizes)
        counts[[kernels.ITEM_ROWS, kernels.ITEM_SAMPLES]] = bounds[-1]
        return Tiers(
            *self._tier_limits,
            short=short,
            long=self._long.open_work(NO_SEGMENTS, num_rows),
            items=items,
            spans=spans,
            out=out,
            ends=ends,
            counts=counts,
        )

    def _close(self, tiers: Tiers) -> None:
        first, num_collected = tiers.short.cursor[kernels.NUM_ROWS], tiers.counts[kernels.TURN]
        collected = tiers.short.rows[first : first + num_collected].copy()
        self._buffered = without_padding(collected, self._limits.multiple)
        self._waited = np.zeros(num_collected, np.int64)
        high_water = tiers.counts[[kernels.HIGH_TURN, kernels.HIGH_HELD]].tolist()
        self._high_water = (high_water[0], high_water[1])
        self._short.close_work(tiers.short)
        self._long.close_work(tiers.long)
        numbers = self._long.buffered[:, SAMPLE]
        spans = tiers.spans[numbers].tolist()
        self._items = [tiers.items[begin:end].copy() for begin, end in spans]
        numbers[:] = np.arange(len(numbers))


def _numbered(items: list[Int64Array], multiple: int) -> Int64Array:
    """Return the rows that represent items in the long tier, shape (n, 6)."""
    numbered = np.zeros((len(items), NUM_COLUMNS), np.int64)
    numbered[:, SAMPLE] = np.arange(len(items))
    for row, item in zip(numbered, items, strict=True):
        row[[LENGTH, TOTAL]] = rooms(item, multiple)[:, LENGTH].sum()
    return numbered
