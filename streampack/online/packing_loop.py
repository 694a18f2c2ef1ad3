"""The packing loop of one worker: draw samples, pack them, and build device batches.

::

    random          source a --.
                    source b --+-- deficits --> packer --> packs --> device batches
                    source c --'
    stratified,     source a -----------------> packer --.
    per_stream      source b -----------------> packer --+-- schedule of slots --> device batches
                    source c -----------------> packer --'

A pack leaves as soon as it is full. A packer gets one piece of a long sample at a time, or as many
short samples as the next packs certainly need. The state is taken between two batches, where it is
only a few integers.

Cost: 5 to 10 us per sample of tokens, with labels or a mask; 30 to 50 us with extra fields.
Memory: each packer's bound, one batch, and one sample being sliced per packer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from streampack.batch.batch import Batch, make_batch
from streampack.batch.buffer_pool import BufferPool
from streampack.errors import DataError, ResumeError, StreampackError
from streampack.mix import Deficits, Schedule
from streampack.online.bucketing import one_row_each
from streampack.online.byte_budget import HeldBytes, tensor_bytes
from streampack.online.lookahead import room_for
from streampack.online.plan import FlowPlan
from streampack.online.restore import ReplayedSample, check_piece, check_whole, key_of
from streampack.online.sample_buffer import SampleBuffer, joined
from streampack.online.samples import EncodedSample, SampleKey, prepare, segment_rows
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.online.stream_sampler import DrawnSample, StreamSampler
from streampack.pack.packer import Packer
from streampack.types import (
    LENGTH,
    NUM_COLUMNS,
    START,
    STREAM,
    TOTAL,
    Int64Array,
    Packs,
    State,
)

NUM_ADDED = 2  # tokens that may be added to a sample: BOS and EOS


@dataclass(slots=True)
class _Pending:
    """A sample that is being sliced."""

    key: SampleKey
    ready: EncodedSample
    rows: Int64Array
    digest: int
    """Digest of the whole sample."""
    next: int = 0
    """Index of the row that the packer gets next."""


@dataclass(slots=True)
class _Lane:
    """A packer with its input and output queues."""

    packer: Packer
    pending: _Pending | None = None
    full: deque[Int64Array] = field(default_factory=deque)
    """Complete packs that are not in a batch yet."""
    has_ended: bool = False


class OnlinePacker:
    """One worker's packing loop over an epoch.

    Args:
        plan: The options that decide the batches.
        place: This worker's rank and number.
        parts: Its slice of each source.
        epoch: The epoch's number.
        held_bytes: The byte budget; None: no bound.
    """

    def __init__(
        self,
        plan: FlowPlan,
        place: WorkerSlice,
        parts: Sequence[SourceSlice],
        epoch: int,
        held_bytes: HeldBytes | None = None,
    ) -> None:
        self._plan = plan
        self._bytes = held_bytes or HeldBytes()
        self._place = place
        self._epoch = epoch
        self._by_tokens = plan.mixing.weight_unit == "tokens"
        self._is_random = plan.mixing.batching_method == "random"
        num = len(plan.streams)
        quotas = [plan.amounts.quota(n, epoch, part, place) for n, part in enumerate(parts)]
        self._quotas = quotas
        self._intakes = [
            StreamSampler(stream, name, part)
            for stream, name, part in zip(plan.streams, plan.names, parts, strict=True)
        ]
        amounts = [
            quota.amount if plan.amounts.are_quotas else plan.amounts.amounts[number]
            for number, quota in enumerate(quotas)
        ]
        self._deficits = Deficits([amount or 0 for amount in amounts], plan.mixing.weight_unit)
        self._lanes = [_Lane(plan.packer()) for _ in range(1 if self._is_random else num)]
        self._held = SampleBuffer(
            plan.packing,
            {k: v for stream in plan.streams for k, v in stream.token_fields.items()},
            list(dict.fromkeys(k for stream in plan.streams for k in stream.payloads)),
            has_labels=any(stream.has_labels for stream in plan.streams),
        )
        self._blocks = BufferPool()
        self._only: int | None = None  # the only stream left, if there is just one
        self._is_stopping = False
        self._ended: int | None = None  # the last stream to end, until another is served
        self._slots: Iterator[Int64Array] | None = None
        self.num_batches = 0
        self._served = [0] * num  # slots given to each stream, where slots are scheduled
        self._substituted = self._num_packs = self._num_slots = 0
        # Columns: samples begun, tokens, samples split, truncated, dropped.
        self._counts = np.zeros((num, 5), np.int64)

    def begin(self) -> None:
        """Begin the epoch."""
        for intake, quota in zip(self._intakes, self._quotas, strict=True):
            intake.begin(self._epoch, quota)
        self._look_for_only()

    # Batches.

    def next_batch(self) -> Batch | None:
        """Return the next device batch; None at the epoch's end."""
        packs = self._next_packs()
        is_short = len(packs) < self._plan.batch_size
        if not packs or (is_short and self._plan.mixing.epoch_end == "drop"):
            return None
        together, num_rows, row_tokens = self._shape(packs)
        self._count(together.segments)
        waiting = self._held.payload_bytes
        rows, extras = self._held.rows(together, num_rows, row_tokens)
        step = self.num_batches * self._place.num_workers + self._place.worker
        self.num_batches += 1
        self._num_packs += len(packs)
        self._num_slots += len(together) * row_tokens
        per_step = self._plan.batch_size * self._place.num_devices
        batch = make_batch(
            rows,
            together,
            epoch=self._epoch,
            position=(step + 1) * per_step,
            positions=self._plan.packing.positions,
            blocks=self._blocks,
        )
        if self._plan.bucketing is not None:
            extras["seq_lens"] = torch.from_numpy(together.segments[:, LENGTH].copy())
        batch |= extras
        left = self._held.payload_bytes
        self._bytes.finish(tensor_bytes(batch), waiting - left, left)
        return batch

    def _shape(self, packs: Sequence[Int64Array]) -> tuple[Packs, int, int]:
        """Return the packs of a batch's rows, the number of rows, and their length."""
        together = joined(packs)
        if self._plan.bucketing is None:
            return together, self._plan.batch_size, self._plan.packing.max_seq_len
        segments = together.segments
        return one_row_each(segments), len(segments), int(segments[:, LENGTH].max())

    def _next_packs(self) -> list[Int64Array]:
        size = self._plan.batch_size
        if self._is_random:
            return self._take(0, size)
        packs: list[Int64Array] = []
        one_stream = self._plan.mixing.batching_method != "stratified"
        for wanted in self._next_slots():
            while (stream := self._live(int(wanted))) is not None:
                self._served[stream] += 1
                found = self._take(stream, size if one_stream else 1)
                # The last batch of a stream may be short: pad it, or drop it.
                if found and (len(found) == size or not one_stream or self._pads):
                    packs += found
                    break
                self._held.rows(joined(found), size)  # dropped: release the tokens
        return packs

    @property
    def _pads(self) -> bool:
        return self._plan.mixing.epoch_end == "pad"

    def _next_slots(self) -> Int64Array:
        """Return the stream of each slot in this worker's next batch."""
        if self._slots is None:
            method, place = self._plan.mixing.batching_method, self._place
            # With per_stream, all ranks share one schedule; otherwise each rank has its own.
            ranks = () if method == "per_stream" else (place.device,)
            schedule = Schedule(
                [amount or 0 for amount in self._plan.amounts.amounts],
                block=self._plan.batch_size if method == "stratified" else 1,
                seed=self._plan.seed,
                place=("buffered", self._epoch, *ranks),
            )
            # A rank's batches come from its workers in round-robin order.
            first = self.num_batches * place.num_workers + place.worker
            self._slots = islice(schedule.blocks(), first, None, place.num_workers)
        return next(self._slots)

    def _live(self, wanted: int) -> int | None:
        """Return the stream that fills a slot: the scheduled one, or a substitute if it ended."""
        if self._has_more(wanted):
            return wanted
        amounts = [amount or 0 for amount in self._plan.amounts.amounts]
        total, num_slots = sum(amounts), sum(self._served) + 1
        owed = sorted(
            (self._served[stream] * total - amount * num_slots, stream)
            for stream, amount in enumerate(amounts)
            if amount
        )
        for _, stream in owed:
            if self._has_more(stream):
                self._substituted += 1
                self._tell_of_end(wanted)
                return stream
        return None

    def _has_more(self, stream: int) -> bool:
        lane = self._lanes[stream]
        while not lane.full and self._feed(stream, 1):
            pass
        return bool(lane.full)

    def _take(self, number: int, most: int) -> list[Int64Array]:
        """Return a lane's next packs: `most` of them, or fewer at its end."""
        lane = self._lanes[number]
        while len(lane.full) < most and self._feed(number, most - len(lane.full)):
            pass
        return [lane.full.popleft() for _ in range(min(most, len(lane.full)))]

    # Samples into packers.

    def _feed(self, number: int, num_packs: int) -> bool:
        """Give a packer its next segments; False once its lane has ended and is flushed."""
        lane = self._lanes[number]
        if lane.has_ended:
            return False
        if lane.pending is not None:
            segments = self._slice(lane, lane.pending)
        else:
            segments = self._draw(number, lane, num_packs)
        if len(segments):
            packs = lane.packer.add(segments)
            lane.full.extend(packs[i] for i in range(len(packs)))
        if lane.has_ended:
            packs = lane.packer.flush()
            lane.full.extend(packs[i] for i in range(len(packs)))
        return True

    def _draw(self, number: int, lane: _Lane, num_packs: int) -> Int64Array:
        """Buffer the samples that a lane certainly needs for its next packs; return their rows."""
        tokens, samples = room_for(lane.packer, num_packs, self._plan.packing, self._plan.bucketing)
        rows: list[Int64Array] = []
        most = self._plan.packing.max_seq_len - NUM_ADDED
        put, intakes = self._held.put, self._intakes
        try:
            while tokens >= 0 and samples >= 0 and lane.pending is None:
                found = self._next_taken(number)
                if found is None:
                    lane.has_ended = True
                    break
                stream, taken = found
                pass_, sample, plain, _ = taken
                if plain is not None and len(plain[0]) <= most:
                    length = put((stream, pass_, sample), plain, intakes[stream].labels_shifted)
                    self._serve(stream, length)
                else:
                    rows += [self._settle(), self._begin(lane, stream, taken)]
                    length = int(rows[-1][:, LENGTH].sum())
                tokens -= length or 1
                samples -= 1
        except Exception:
            self._settle()  # an error in an earlier sample takes precedence
            raise
        rows.append(self._settle())
        return np.concatenate(rows) if len(rows) > 1 else rows[0]

    def _serve(self, stream: int, num_tokens: int) -> None:
        if self._is_random and self._only is None:
            self._deficits.serve(stream, num_tokens if self._by_tokens else 1)

    def _settle(self) -> Int64Array:
        return self._held.settle(self._refuse)

    def _refuse(self, key: SampleKey, tokens: Int64Array, labels: Int64Array) -> None:
        stream, _, number = key
        self._plan.streams[stream].check_ids(number, tokens)
        self._plan.streams[stream].check_labels(number, labels)

    def _slice(self, lane: _Lane, pending: _Pending) -> Int64Array:
        """Buffer the next piece of a long sample and return its row."""
        rows: Int64Array = pending.rows[pending.next : pending.next + 1]
        row = rows[0]
        start, length, total = int(row[START]), int(row[LENGTH]), int(row[TOTAL])
        self._held.hold(pending.key, pending.ready, start, length, total)
        if self._held.payload_bytes:
            stream, _, number = pending.key
            self._bytes.check(self._held.payload_bytes, self._plan.streams[stream].where(number))
        pending.next += 1
        lane.pending = pending if pending.next < len(pending.rows) else None
        return rows

    def _begin(self, lane: _Lane, stream: int, taken: DrawnSample) -> Int64Array:
        """Buffer a sample, or the first piece of a long one; return its row, if it has any."""
        key = (stream, taken.pass_, taken.number)
        ready = self._prepare(stream, taken)
        rows = np.zeros((0, NUM_COLUMNS), np.int64)
        try:
            rows = self._rows(key, ready)
        except DataError as error:
            if self._plan.packing.overflow == "error":
                raise
            self._intakes[stream].skip(error)
        else:
            self._counts[stream, 4] += not len(rows)
            kept = int(rows[-1, TOTAL]) if len(rows) else 0
            self._counts[stream, 3] += 0 < kept < len(ready.tokens)
        self._serve(stream, int(rows[:, LENGTH].sum()) or 1)
        if not len(rows):
            return rows
        # Only for a sample in several pieces: the digest is all that verifies the remaining ones.
        digest = self._held.whole_digest(ready) if len(rows) > 1 else 0
        return self._slice(lane, _Pending(key, ready, rows, digest))

    def _prepare(self, stream: int, taken: DrawnSample) -> EncodedSample:
        shifted = bool(self._intakes[stream].labels_shifted)
        sample = taken.sample or self._intakes[stream].closely(taken)
        return prepare(sample, self._plan.packing, labels_shifted=shifted)

    def _rows(self, key: SampleKey, ready: EncodedSample) -> Int64Array:
        may_split = self._plan.streams[key[0]].split_payloads
        return segment_rows(key, ready, self._plan.packing, self._plan.names, may_split=may_split)

    def _next_taken(self, number: int) -> tuple[int, DrawnSample] | None:
        """Return the next sample of a lane and its stream; None at the lane's end."""
        while not self._is_stopping:
            stream = self._only
            if stream is None:
                stream = self._deficits.next() if self._is_random else number
            if stream is None:
                return None
            taken = self._intakes[stream].next()
            if taken is not None:
                if self._ended is not None:
                    self._tell_of_end(self._ended)
                return stream, taken
            if self._plan.mixing.stop == "first_exhausted" and self._quotas[stream].amount != 0:
                self._is_stopping = True
            if not self._is_random:
                return None
            self._deficits.end(stream)
            self._ended = stream
            self._look_for_only()
        return None

    def _tell_of_end(self, stream: int) -> None:
        """Warn that the other streams continue without this one, so proportions no longer hold."""
        self._ended = None
        if not self._plan.amounts.are_quotas:
            self._intakes[stream].tell_of_end()

    def _look_for_only(self) -> None:
        """Note the only stream left, if there is just one: it needs no deficit accounting."""
        amounts = self._deficits.state_dict()["amounts"]
        live = [stream for stream, amount in enumerate(amounts) if amount]
        self._only = live[0] if self._is_random and len(live) == 1 else None

    # Counts and state.

    def _count(self, segments: Int64Array) -> None:
        num = len(self._counts)
        streams = segments[:, STREAM]
        begins = segments[:, START] == 0
        self._counts[:, 0] += np.bincount(streams[begins], minlength=num)
        self._counts[:, 1] += np.bincount(
            streams, weights=segments[:, LENGTH], minlength=num
        ).astype(np.int64)
        cut = begins & (segments[:, LENGTH] < segments[:, TOTAL])
        self._counts[:, 2] += np.bincount(streams[cut], minlength=num)

    def state_dict(self) -> State:
        """Return the worker's state between two batches, as JSON: addresses, no tokens."""
        pending = [lane.pending for lane in self._lanes]
        last = [
            address
            for stream, address in sorted(self._held.last.items())
            if self._intakes[stream].is_near(key_of(address))
        ]
        keys = {*self._held.keys, *map(key_of, last)}
        keys |= {each.key for each in pending if each is not None}
        keys_of = _by_stream(keys)
        return {
            "epoch": self._epoch,
            "num_batches": self.num_batches,
            "sources": [
                intake.state_dict(keys_of.get(number, ()))
                for number, intake in enumerate(self._intakes)
            ],
            "deficits": self._deficits.state_dict(),
            "lanes": [_lane_state(lane) for lane in self._lanes],
            "held": self._held.state_dict(),
            "last": last,
            "is_stopping": self._is_stopping,
            "served": list(self._served),
            "substituted": self._substituted,
            "num_packs": self._num_packs,
            "num_slots": self._num_slots,
            "counts": self._counts.tolist(),
            "high_water_tokens": self._held.high_water_tokens,
            "high_water_bytes": self._bytes.high_water,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a worker's state; buffered samples are read again.

        Raises:
            DataError: If a source does not give the same samples again.
            ResumeError: If the state is damaged, or a source cannot resume from its part of it.
        """
        try:
            self._restore(state)
        except StreampackError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ResumeError(
                "the state is damaged, or a source cannot go on from its own part of it "
                f"({type(error).__name__}: {error}); load what state_dict() returned, unchanged"
            ) from error

    def _restore(self, state: State) -> None:
        slicing = [lane["pending"] for lane in state["lanes"]]
        keys = {key_of(address) for address in [*state["held"], *state["last"]]}
        keys |= {key_of(each[0]) for each in slicing if each is not None}
        keys_of = _by_stream(sorted(keys))
        prepared: dict[SampleKey, ReplayedSample] = {}
        for number, intake in enumerate(self._intakes):
            again = intake.load_state_dict(
                state["sources"][number],
                self._epoch,
                self._quotas[number],
                keys_of.get(number, ()),
            )
            for key, sample in again.items():
                taken = DrawnSample(key[1], key[2], None, sample)
                ready = self._prepare(number, taken)
                prepared[key] = ReplayedSample(key, ready, self._rows(key, ready))
        for address in [*state["held"], *state["last"]]:
            check_piece(address, prepared[key_of(address)], self._held, self._plan.streams)
        for address in state["held"]:
            found = prepared[key_of(address)]
            self._held.restore(address, found.ready, found.total)
        self._held.last = {int(address[0]): list(map(int, address)) for address in state["last"]}
        for lane, saved in zip(self._lanes, state["lanes"], strict=True):
            lane.packer.load_state_dict(saved["packer"])
            lane.full = deque(np.array(rows, np.int64) for rows in saved["full"])
            lane.has_ended = bool(saved["has_ended"])
            if saved["pending"] is not None:
                found, digest = prepared[key_of(saved["pending"][0])], int(saved["pending"][1])
                check_whole(digest, found, self._held, self._plan.streams)
                lane.pending = _Pending(*found, digest, int(saved["pending"][2]))
        self._deficits.load_state_dict(state["deficits"])
        self._look_for_only()
        self._is_stopping = bool(state["is_stopping"])
        self.num_batches = int(state["num_batches"])
        self._served = [int(n) for n, _ in zip(state["served"], self._served, strict=True)]
        self._substituted, self._num_packs = int(state["substituted"]), int(state["num_packs"])
        self._num_slots = int(state["num_slots"])
        self._counts = np.array(state["counts"], np.int64).reshape(self._counts.shape)
        self._held.high_water_tokens = int(state["high_water_tokens"])
        self._bytes.high_water = int(state["high_water_bytes"])


def _by_stream(keys: Iterable[SampleKey]) -> dict[int, list[SampleKey]]:
    """Group keys by stream, in order."""
    found: dict[int, list[SampleKey]] = {}
    for key in keys:
        found.setdefault(key[0], []).append(key)
    return found


def _lane_state(lane: _Lane) -> State:
    pending = lane.pending
    return {
        "packer": lane.packer.state_dict(),
        "full": [rows.tolist() for rows in lane.full],
        "has_ended": lane.has_ended,
        "pending": None if pending is None else [list(pending.key), pending.digest, pending.next],
    }
