"""One worker's samples of one stream: read in groups, decoded, counted, with bad samples skipped.

::

    SourceSlice --64 items--> ItemDecoder --columns--> waiting --take--> samples
                              texts are encoded        | bad ones: raise, skip

The state is a position in the source and never has tokens: on resume, buffered samples are reread.

Cost: 0.1 us per sample of a list, else 1 us, plus the source and the tokenizer. Memory: one group
of items, in which one follows 65,536 tokens or characters at most; one item if it has payloads.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from streampack.errors import DataError
from streampack.online.epoch_quota import WorkerQuota
from streampack.online.item_decoder import Columns, ItemDecoder
from streampack.online.plan import FlowPlan
from streampack.online.source_slice import Items, SourceSlice
from streampack.pack import fit_samples
from streampack.streams.label_shift import NUM_LOOKED_AT, labels_are_shifted, unclear_shift
from streampack.streams.sample_fields import invalid_labels, invalid_token_ids
from streampack.texts.source_traits import is_one_shot
from streampack.types import PASS, SAMPLE, STREAM, TOKENS, Int64Array, State

CHUNK = 64  # items that are read together
LIST_ITEMS = 256  # of a list: its items are in memory already
SIZE_TOGETHER = 65_536  # tokens or characters, up to the last item

# Columns of the lines: a sample row, the items of the slice up to and with it in that pass, its
# tokens that are packed, and what was taken with it.
TAKEN_AT, SERVED_AT, AMOUNT_AT, BAD_AT = range(TOKENS + 1, TOKENS + 5)
NUM_FIELDS = TOKENS + 5
POSITION = [PASS, TAKEN_AT, AMOUNT_AT, BAD_AT]

SAME_SAMPLES = (
    "; a source must give the same samples in the same order each time: pass it, and its "
    "tokenizer, as they were, or start again without the state"
)

log = logging.getLogger(__name__)


class SourcePosition(NamedTuple):
    """A position in a stream, in an epoch."""

    pass_: int
    taken: int
    """Items of the slice before it in that pass."""
    amount: int
    """Samples, or tokens, that were taken in the epoch."""
    bad: int
    """Bad samples that were skipped in the epoch."""


class StreamSampler:
    """Samples of stream `number` in the order in which this worker takes them."""

    def __init__(
        self, plan: FlowPlan, number: int, slice_: SourceSlice, quota: WorkerQuota
    ) -> None:
        self._number = number
        self._stream = stream = plan.streams[number]
        self._name = slice_.name
        self._slice = slice_
        self._packing = plan.packing
        self._decoder = ItemDecoder(plan, number, copies=not slice_.is_list)
        self.most_together = CHUNK
        """Items that are read together. Payloads of a group would all be in memory together."""
        if stream.payloads.payloads:
            self.most_together = 1
        elif slice_.is_list and stream.tokenizer is None:
            self.most_together = LIST_ITEMS
        self._quota = quota
        self._has_ended = quota.amount == 0
        self._reset(SourcePosition(0, 0, 0, 0))
        self._num_known_bad = 0
        self._warns_next = False  # whether to warn about unused label columns at the next item
        # Whether labels[i] is tokens[i + 1]; None until detected.
        self.labels_shifted = stream.labels_shifted if stream.labels else False

    def _reset(self, position: SourcePosition) -> None:
        self._lines = np.zeros((0, NUM_FIELDS), np.int64)
        self._columns: Columns = [[], [], [], []]
        self._num_taken = 0  # of these
        self._error: Exception | None = None  # what comes behind them
        self._at = self._read_to = position

    def begin(self, epoch: int) -> None:
        # Once, not in every worker and epoch.
        self._warns_next = epoch == 0 and self._slice.worker_slice.index == 0
        quota, pass_, taken = self._quota, epoch, 0
        if quota.skipped:
            per_pass, _ = self._slice.count()
            pass_, taken = divmod(quota.skipped, per_pass) if per_pass else (epoch, 0)
        elif quota.skipped is not None:
            pass_ = 0
        if not self._has_ended:
            self._slice.begin(pass_, taken)
        self._reset(SourcePosition(pass_, taken, 0, 0))

    # Samples.

    @property
    def position(self) -> SourcePosition:
        # What follows the last sample is known to be bad, or that there is nothing.
        return self._at if self._num_taken < len(self._lines) else self._read_to

    @property
    def waiting(self) -> Int64Array:
        """The tokens of each sample that can be taken, as they are packed, shape (n,).

        None can, until it is known whether labels are shifted.
        """
        first = len(self._lines) if self.labels_shifted is None else self._num_taken
        lengths: Int64Array = self._lines[first:, SERVED_AT]
        return lengths

    def read(self) -> bool:
        """Read samples if none wait. Return False if the quota is reached, or the stream ended."""
        while self._num_taken == len(self._lines):
            if not self._read_more():
                return False
        if self.labels_shifted is None:
            self._detect_label_shift()
        return True

    def take(self, num: int) -> tuple[Int64Array, Columns]:
        """Return rows, shape (num, 4), and columns of the next samples that wait."""
        part = slice(self._num_taken, self._num_taken + num)
        lines, self._num_taken = self._lines[part], part.stop
        self._at = SourcePosition(*lines[-1, POSITION].tolist())
        return lines[:, : TOKENS + 1].copy(), [rows[part] for rows in self._columns]

    def warn_of_end(self) -> None:
        """Warn, once, that the stream has ended while others continue."""
        # In the first worker only.
        slice_ = self._slice
        if self._stream.proportion is None or slice_.worker_slice.index or slice_.has_warned:
            return
        slice_.has_warned = True
        again = "" if is_one_shot(slice_.source) else "stop='repeat' or epoch_size=, or "
        log.warning(
            "stream %r has ended in pass %d and others continue without it, so their shares are no "
            "longer the proportions asked for; to keep these to the epoch's end set Mixing(%s"
            "stop='first_exhausted')",
            self._name,
            self.position.pass_,
            again,
        )

    # From items to samples.

    def _read_more(self) -> bool:
        """Read another group; False if there is none. It may have only bad samples."""
        if self._error is not None:
            raise self._error
        most, limit = self.most_together, self._quota.amount
        if limit is not None:
            left = limit - self._read_to.amount
            if left <= 0:
                return False
            most = most if self._quota.by_tokens else min(most, left)
        items = self._pull(most)
        if items is None:
            return False
        self._append(items, *self._decoder.decode(items.values, items.numbers))
        return True

    def _append(self, items: Items, lengths: Int64Array, columns: Columns) -> None:
        """Add a group, up to the quota, or to a sample that is an error."""
        lines = self._lines_of(items, lengths, columns)
        is_bad, stop = lengths == 0, len(lines)
        if self._quota.by_tokens and self._quota.amount is not None:
            stop = min(stop, int(lines[:, AMOUNT_AT].searchsorted(self._quota.amount)) + 1)
        is_refused = is_bad
        if self._packing.overflow == "error":
            is_refused = is_bad | (lengths > self._packing.max_seq_len)
        for index in np.flatnonzero(is_refused[:stop]).tolist():
            self._error = self._refusal(lines[index], columns[0][index])
            if self._error is not None:
                stop = index
                break
        if stop:
            self._read_to = SourcePosition(*lines[stop - 1, POSITION].tolist())
        good = np.flatnonzero(~is_bad[:stop])
        if len(good) < len(lines):
            lines, places = lines[good], good.tolist()
            columns = [rows and [rows[place] for place in places] for rows in columns]
        if self._num_taken < len(self._lines):
            lines = np.concatenate([self._lines, lines])
            columns = list(map(list.__add__, self._columns, columns))
        else:
            self._num_taken = 0
        self._lines, self._columns = lines, columns

    def _lines_of(self, items: Items, lengths: Int64Array, columns: Columns) -> Int64Array:
        num = len(items.values)
        before, size, overflow = self._read_to, self._packing.max_seq_len, self._packing.overflow
        lines = np.empty((num, NUM_FIELDS), np.int64)
        lines[:, STREAM], lines[:, PASS] = self._number, items.pass_
        lines[:, SAMPLE] = items.numbers
        lines[:, TAKEN_AT] = np.arange(items.taken + 1, items.taken + num + 1)
        lines[:, TOKENS] = lines[:, SERVED_AT] = lengths
        if overflow != "split":  # one that is dropped counts as one token
            lines[lengths > size, SERVED_AT] = size if overflow == "truncate" else 1
        for index, extras in enumerate(columns[3]):
            if extras is not None and extras.ends:
                lines[index, SERVED_AT] = extras.ends[-1]
        own = np.ones(num, np.int64)
        if self._quota.by_tokens:
            own[:] = [0 if isinstance(row, DataError) else len(row) for row in columns[0]]
        lines[:, AMOUNT_AT] = before.amount + np.cumsum(own)
        lines[:, BAD_AT] = before.bad + np.cumsum(lengths == 0)
        return lines

    def _refusal(self, line: Int64Array, error: DataError | Any) -> DataError | None:
        """Skip a bad sample; return the error if that is not possible."""
        if not isinstance(error, DataError):  # longer than a pack
            row = np.array([[0, *line[PASS : TOKENS + 1].tolist()]])
            try:
                fit_samples(row, self._packing.max_seq_len, "error", [self._name])
            except DataError as too_long:
                return too_long
        num_bad, most = int(line[BAD_AT]), self._stream.most_bad
        if most is None:
            return error
        if num_bad > most:
            refused = DataError(
                f"stream {self._name!r}: more than on_bad_row={most} bad samples in a worker; "
                f"the last one: {error}"
            )
            refused.__cause__ = error
            return refused
        if num_bad > self._num_known_bad:
            log.warning("skipped bad sample %d: %s", num_bad, error)
        return None

    def _pull(self, most: int) -> Items | None:
        """Return the next items, from the next pass if this one is over and the quota needs it."""
        num_empty = 0
        while not self._has_ended:
            items = self._slice.read(most, enough=SIZE_TOGETHER, own=self._own)
            if items is not None:
                self._look_at(items.values[0])
                return items
            if self._slice.is_empty:
                raise DataError(
                    f"stream {self._name!r}: its source "
                    f"({type(self._stream.source).__name__}) is empty; omit the stream"
                )
            wants_more = self._quota.amount is not None
            num_empty += not self._slice.taken  # no item was read or skipped in this pass
            if not wants_more or num_empty >= self._slice.most_empty_passes:
                self._has_ended = True
                if wants_more and self._slice.most_empty_passes > 1:
                    own = self._slice.worker_slice
                    log.warning(
                        f"stream {self._name!r}: worker {own.worker} of rank {own.device} got no "
                        f"sample in {num_empty} passes, so it takes none in this epoch; use fewer "
                        "workers, or give the source more shards"
                    )
                break
            self._slice.begin(self._slice.pass_ + 1)
        return None

    def _own(self, item: Any) -> tuple[Any, int]:
        self._look_at(item)
        return self._decoder.own(item)

    def _look_at(self, item: Any) -> None:
        if self._warns_next:
            self._warns_next = False
            self._stream.warn_unused_label_column(item)

    def _detect_label_shift(self) -> None:
        """Look at the first samples, each with those before it, until they tell."""
        looked_at: list[tuple[Any, Any]] = []
        for index in range(NUM_LOOKED_AT):
            if index == len(self._lines) and not self._read_more():
                break
            if index >= len(self._lines):
                continue
            tokens, labels = self._columns[0][index], self._columns[1][index]
            if not (len(invalid_token_ids(tokens)) or len(invalid_labels(labels))):
                looked_at.append((tokens, labels))
                self.labels_shifted = labels_are_shifted(looked_at)
                if self.labels_shifted is not None:
                    return
        if looked_at:
            raise unclear_shift(self._name, len(looked_at))

    # State.

    def state_dict(self, start: SourcePosition) -> tuple[State, list[Any] | None]:
        """Return a state that continues at `start`, an earlier position, and the source's own."""
        own = None if self._slice.has_index else self._slice.base(start.pass_, start.taken)
        return {
            "start": list(start),
            "skipped": self.position.bad,
            "bad": self._read_to.bad,
            "has_warned": self._slice.has_warned,
            "labels_shifted": self.labels_shifted,
            "size": self._slice.indexed_size,
        }, own

    def load_state_dict(self, state: State, own: list[Any] | None) -> None:
        """Continue where a state starts. Bad samples that were met before it is left are known."""
        self._reset(SourcePosition(*map(int, state["start"])))
        self._num_known_bad = int(state["bad"])
        self._slice.has_warned |= bool(state["has_warned"])
        self.labels_shifted = state["labels_shifted"]
        if self._has_ended:
            return
        if state["size"] != self._slice.indexed_size:
            raise DataError(
                f"stream {self._name!r}: its source has {self._slice.indexed_size} samples, but "
                f"had {state['size']} when the state was saved{SAME_SAMPLES}"
            )
        pass_, taken, *_ = self._at
        self._slice.begin(pass_, taken, own)
        if self._slice.taken < taken:
            raise DataError(
                f"stream {self._name!r}: the state is {taken} samples into pass {pass_}, but the "
                f"source gave {self._slice.taken}{SAME_SAMPLES}"
            )
