"""One packer of a worker: the samples that it gets, and the packs that it completes.

::

    StreamMixer --window--> packer, which takes what its next packs need --> full packs
    a long sample --piece by piece--'    the buffer gets the tokens of what it took

Cost: about 60 us per call of the packer, a few of which make a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from streampack.config import Bucketing, Packing
from streampack.errors import DataError
from streampack.online.byte_budget import HeldBytes
from streampack.online.pack_window import PackWindow
from streampack.online.plan import FlowPlan
from streampack.online.restore import changed_source, key_of
from streampack.online.sample_buffer import SampleBuffer
from streampack.online.samples import CutSample, SampleKey, prepare, segment_rows
from streampack.online.stream_mixer import StreamMixer, Window
from streampack.pack.buffered import PATIENCE, TOLERANCE
from streampack.pack.packer import Packer
from streampack.runtime.stats import DROPPED, TRUNCATED
from streampack.streams import IterableSample
from streampack.types import SAMPLE, START, STREAM, TOTAL, Int64Array, State

SHIFTED_OF = attrgetter("labels_shifted")


@dataclass(slots=True)
class Pending:
    """A sample that is being sliced."""

    sample: CutSample
    digest: int
    """Digest of the whole sample; 0 if it is in one piece."""
    next: int = 0
    """Index of the row that the packer gets next."""


class Lookahead:
    """The tokens and samples that cannot close the last of the packs that a packer still owes.

    With max_seq_len=1000, 8 packs wanted and 1,500 tokens buffered by exact fit::

        8 packs      hold 8 * 999 tokens at least, so 6,491 more can close at most 7 of them
        the last     is closed by the next sample, or by one after it

    So a slow source is never asked for a sample that the next batch may not need. A packer call
    costs more than the samples it takes, and it is called only a few times per batch.
    """

    def __init__(self, packing: Packing, bucketing: Bucketing | None, most_packs: int) -> None:
        self._most_samples = packing.buffer_samples - 1
        self._least = [least_tokens(packing, num) for num in range(most_packs + 1)]
        # Once the buffer is full, every sample completes a batch.
        self._of_buckets = packing.buffer_samples * packing.max_seq_len if bucketing else None
        self._is_unknown = bool(packing.max_samples_per_pack or packing.pad_to_multiple)
        self._is_unknown |= packing.method == "two_tiers"

    def certain(self, packer: Packer, num_packs: int) -> tuple[int, int]:
        """Return the tokens and samples that cannot close the last of the next `num_packs` packs.

        One sample more than that can be added in a single call.
        """
        samples = max(self._most_samples - packer.held[1], 0)
        if self._of_buckets is not None:
            return self._of_buckets, samples
        if self._is_unknown:
            return 0, 0
        return max(self._least[num_packs] - packer.held[0] - 1, 0), samples


class Lane:
    """A packer with its input and output queues.

    `number` is the stream that it packs, unless it packs all; `packs` is its queue of complete
    packs. The rest is the worker's; `counts` has a column for each of `COUNTED`.
    """

    def __init__(
        self,
        number: int,
        plan: FlowPlan,
        mixer: StreamMixer,
        held: SampleBuffer,
        held_bytes: HeldBytes,
        counts: Int64Array,
        packs: PackWindow,
    ) -> None:
        self._number = number
        self._plan = plan
        self._mixer = mixer
        self._held = held
        self._bytes = held_bytes
        self._counts = counts
        self._packer = plan.packer()
        self._room = Lookahead(plan.packing, plan.bucketing, plan.batch_size)
        self.pending: Pending | None = None
        """The sample that is being sliced."""
        self._packs = packs  # complete packs that are not in a batch yet
        self._has_ended = False

    def has_pack(self) -> bool:
        """Whether there is another pack, which may have to be completed."""
        packs = self._packs
        while not packs.ready and self._feed(packs.missing(1)):
            pass
        return bool(packs.ready)

    def take(self, most: int) -> list[Int64Array]:
        """Return the next packs: `most` of them, or fewer at the end."""
        packs, ready = self._packs, self._packs.ready
        while len(ready) < most and self._feed(packs.missing(most)):
            pass
        return [ready.popleft() for _ in range(min(most, len(ready)))]

    def _feed(self, num_packs: int) -> bool:
        """Give a packer its next segments; False once its lane has ended and is flushed."""
        if self._has_ended:
            return False
        wanted = self._packs.num_appended + num_packs
        if self.pending is None:
            self._feed_samples(num_packs)
        if self.pending is not None:
            self._feed_pieces(self.pending, wanted - self._packs.num_appended)
        if self._has_ended:
            self._packs.append(self._packer.flush())
            self._packs.finish()
        return True

    def _feed_samples(self, num_packs: int) -> None:
        """Give a packer whole samples; the last one may be left pending."""
        tokens, samples = self._room.certain(self._packer, num_packs)
        window = Window(tokens, samples, num_packs * self._plan.packing.max_seq_len)
        try:
            self._mixer.choose(window, self._number)
        except Exception:
            if window.streams:  # an error in an earlier sample takes precedence
                self._hold(*self._mixer.drawn(window))
            raise
        if window.streams:
            rows, columns = self._mixer.drawn(window)
            packs, num_added = self._packer.add_until(rows, num_packs)
            self._packs.append(packs)
            self._hold(rows[:num_added], columns)
            self._mixer.take(rows, num_added)
        if window.last is not None:
            self.pending = self._begin(window.last)
        self._has_ended = window.has_ended

    def _hold(self, rows: Int64Array, columns: Sequence[Sequence[Any]]) -> None:
        """Copy samples into the buffer, and check them; the columns may hold more after these."""
        are_shifted = list(map(bool, map(SHIFTED_OF, self._mixer.samplers)))
        first_bad = self._held.extend(rows, columns, are_shifted)
        if first_bad < len(rows):
            stream, number = rows[first_bad, [STREAM, SAMPLE]].tolist()
            tokens, *labels = [column[first_bad] for column in columns]
            self._plan.streams[stream].check_ids(number, tokens)
            if labels:
                self._plan.streams[stream].check_labels(number, labels[0])

    def _feed_pieces(self, pending: Pending, num_packs: int) -> None:
        key, ready, rows, _ = pending.sample
        left = rows[pending.next :]
        packs, num_added = self._packer.add_until(left, num_packs)
        self._packs.append(packs)
        for row in left[:num_added].tolist():
            start, length, total = row[START:]
            self._held.append_piece(key, ready, start, length, total)
            if self._held.payload_bytes:
                stream, _, number = key
                where = self._plan.streams[stream].where(number)
                self._bytes.check(self._held.payload_bytes, where)
        pending.next += num_added
        self.pending = pending if pending.next < len(rows) else None

    def _begin(self, stream: int) -> Pending | None:
        """Encode a stream's next sample and cut it into segments; None if it is dropped."""
        source = self._mixer.samplers[stream].ready
        pass_, number, _ = source.origin(0)
        parsed, total = source.tokens[0].sample, 0
        self._mixer.samplers[stream].take(1)
        try:
            sample = cut_sample(self._plan, self._mixer, (stream, pass_, number), parsed)
        except DataError as error:
            if self._plan.packing.overflow == "error":
                raise
            self._mixer.samplers[stream].skip(error)
        else:
            total = sample.total
            self._counts[stream, DROPPED] += not total
            self._counts[stream, TRUNCATED] += 0 < total < len(sample.ready.tokens)
        self._mixer.serve(stream, total or 1)
        if not total:
            return None
        # Only for a sample in several pieces: the digest is all that verifies the remaining ones.
        digest = self._held.whole_digest(sample.ready) if len(sample.rows) > 1 else 0
        return Pending(sample, digest)

    # State.

    def packs(self) -> list[Int64Array]:
        """Return the segment rows of each complete pack, and of the packer's buffer behind them."""
        return [*self._packs.packs(), self._packer.buffered]

    def state_dict(self) -> State:
        """Return the packer's state and the queues, as JSON."""
        pending = self.pending
        return {
            "packer": self._packer.state_dict(),
            **self._packs.state_dict(),
            "has_ended": self._has_ended,
            "pending": pending and [list(pending.sample.key), pending.digest, pending.next],
        }

    def load_state_dict(self, state: State, replayed: Mapping[SampleKey, CutSample]) -> None:
        """Resume from a state; `replayed` holds the sample that is being sliced."""
        self._packer.load_state_dict(state["packer"])
        self._packs.load_state_dict(state)
        self._has_ended = bool(state["has_ended"])
        if state["pending"] is not None:
            sample, digest = replayed[key_of(state["pending"][0])], int(state["pending"][1])
            if self._held.whole_digest(sample.ready) != digest:
                raise changed_source(sample, self._plan.streams)
            self.pending = Pending(sample, digest, int(state["pending"][2]))


def cut_sample(
    plan: FlowPlan, mixer: StreamMixer, key: SampleKey, sample: IterableSample
) -> CutSample:
    """Encode a sample, and cut it into segments."""
    stream = key[0]
    shifted = bool(mixer.samplers[stream].labels_shifted)
    ready = prepare(sample, plan.packing, labels_shifted=shifted)
    may_split = plan.streams[stream].split_payloads
    rows = segment_rows(key, ready, plan.packing, plan.names, may_split=may_split)
    return CutSample(key, ready, rows, total=int(rows[-1, TOTAL]) if len(rows) else 0)


def least_tokens(packing: Packing, num_packs: int) -> int:
    """Return the fewest tokens with which an empty packer can close `num_packs` packs.

    >>> [least_tokens(Packing(max_seq_len=1000, method="exact_fit"), n) for n in (8, 1)]
    [7992, 1000]
    """
    size, method = packing.max_seq_len, packing.method
    if method == "concat":
        return num_packs * size
    if method == "next_fit":
        # Two consecutive packs hold more than max_seq_len tokens.
        return (num_packs + 1) // 2 * size
    if method == "knapsack":
        return packing.buffer_limit + 1
    if method == "exact_fit":
        # A pack within the tolerance may close with less than a pack buffered: only the last one.
        tolerance = size // TOLERANCE
        least = (num_packs - (tolerance >= PATIENCE)) * (size - tolerance)
    else:
        # The sample that closes a pack does not fit into it, and closes no other pack.
        least = num_packs * size // 2 if packing.guard is None else size
    # A full buffer closes packs early.
    return max(size, min(least, packing.buffer_limit + 1))
