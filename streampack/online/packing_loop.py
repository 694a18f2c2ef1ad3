"""The packing loop of one worker: draw samples, pack them, and build device batches.

::

    random          source a --.
                    source b --+-- deficits --> packer --> packs --> device batches
                    source c --'
    stratified,     source a -----------------> packer --.
    per_stream      source b -----------------> packer --+-- schedule of slots --> device batches
                    source c -----------------> packer --'

A pack leaves as soon as it is full, or shuffled with others (`PackWindow`). A packer gets one piece
of a long sample at a time, or as many short samples as the next packs certainly need. The state is
taken between two batches, where it is only a few integers.

Cost: 1 to 2.5 us per sample of tokens, and 7 ns per token; 30 to 50 us with extra fields.
Memory: each packer's bound, one batch, and one sample being sliced per packer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from streampack.batch.batch import Batch, make_batches
from streampack.batch.buffer_pool import BufferPool
from streampack.errors import ResumeError, StreampackError
from streampack.mix import Schedule
from streampack.online.byte_budget import HeldBytes, tensor_bytes
from streampack.online.lane import Lane, cut_sample
from streampack.online.pack_window import PackWindow
from streampack.online.plan import FlowPlan
from streampack.online.restore import check_packs, check_piece, key_of
from streampack.online.sample_buffer import SampleBuffer, joined
from streampack.online.samples import CutSample, SampleKey
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.online.stream_mixer import StreamMixer
from streampack.runtime.stats import COUNTED, count_segments
from streampack.types import LENGTH, PASS, SAMPLE, Int64Array, Packs, State


class OnlinePacker:
    """One worker's packing loop over an epoch.

    `slices` are its slices of the sources. `window` is the number of packs that are shuffled
    together; 0: no shuffle.
    """

    def __init__(
        self,
        plan: FlowPlan,
        worker_slice: WorkerSlice,
        slices: Sequence[SourceSlice],
        epoch: int,
        held_bytes: HeldBytes,
        window: int = 0,
    ) -> None:
        self._plan = plan
        self._bytes = held_bytes
        self._worker_slice = worker_slice
        self._epoch = epoch
        self._is_random = plan.mixing.batching_method == "random"
        num = len(plan.streams)
        self._mixer = StreamMixer(plan, worker_slice, slices, epoch)
        self._samplers = self._mixer.samplers
        self._replays = not all(sampler.has_index for sampler in self._samplers)
        self._held = SampleBuffer(
            plan.packing,
            {k: v for stream in plan.streams for k, v in stream.token_fields.items()},
            list(dict.fromkeys(k for stream in plan.streams for k in stream.payloads)),
            has_labels=any(stream.has_labels for stream in plan.streams),
        )
        self._blocks = BufferPool()
        self._slots: Iterator[Int64Array] | None = None
        self.num_batches = 0
        self._served = [0] * num  # slots given to each stream, where slots are scheduled
        self._substituted = self._num_packs = self._num_slots = 0
        self._counts = np.zeros((num, len(COUNTED)), np.int64)
        at = (epoch, worker_slice.device, worker_slice.worker)
        queues = [
            PackWindow(size=size, most=plan.batch_size, seed=plan.seed, seed_path=(*at, number))
            for number, size in enumerate(plan.window_sizes(window))
        ]
        self._lanes = [
            Lane(number, plan, self._mixer, self._held, self._bytes, self._counts, packs)
            for number, packs in enumerate(queues)
        ]

    def begin(self) -> None:
        """Begin the epoch."""
        self._mixer.begin()

    # Batches.

    def next_batch(self) -> Batch | None:
        """Return the next device batch; None at the epoch's end."""
        packs = self._next_packs()
        is_short = len(packs) < self._plan.batch_size
        if not packs or (is_short and self._plan.mixing.epoch_end == "drop"):
            return None
        together, num_rows, row_tokens = self._shape(packs)
        count_segments(together.segments, self._counts)
        waiting = self._held.payload_bytes
        rows, extras = self._held.pop_rows(together, num_rows, row_tokens)
        step = self.num_batches * self._worker_slice.num_workers + self._worker_slice.worker
        self.num_batches += 1
        self._num_packs += len(packs)
        self._num_slots += len(together) * row_tokens
        per_step = self._plan.batch_size * self._worker_slice.num_devices
        [batch] = make_batches(
            rows,
            together,
            steps=[(self._epoch, (step + 1) * per_step)],
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
        one_each = Packs(segments=segments, ends=np.arange(1, len(segments) + 1))
        return one_each, len(segments), int(segments[:, LENGTH].max())

    def _next_packs(self) -> list[Int64Array]:
        size = self._plan.batch_size
        if self._is_random:
            return self._lanes[0].take(size)
        packs: list[Int64Array] = []
        one_stream = self._plan.mixing.batching_method != "stratified"
        for wanted in self._next_slots():
            while (stream := self._serving_stream(int(wanted))) is not None:
                self._served[stream] += 1
                found = self._lanes[stream].take(size if one_stream else 1)
                # The last batch of a stream may be short: pad it, or drop it.
                pads = self._plan.mixing.epoch_end == "pad"
                if found and (len(found) == size or not one_stream or pads):
                    packs += found
                    break
                self._held.pop_rows(joined(found), size)  # dropped: release the tokens
        return packs

    def _next_slots(self) -> Int64Array:
        """Return the stream of each slot in this worker's next batch."""
        if self._slots is None:
            method, worker_slice = self._plan.mixing.batching_method, self._worker_slice
            # With per_stream, all ranks share one schedule; otherwise each rank has its own.
            ranks = () if method == "per_stream" else (worker_slice.device,)
            schedule = Schedule(
                [amount or 0 for amount in self._plan.amounts.amounts],
                block=self._plan.batch_size if method == "stratified" else 1,
                seed=self._plan.seed,
                seed_path=("buffered", self._epoch, *ranks),
            )
            # A rank's batches come from its workers in round-robin order.
            first = self.num_batches * worker_slice.num_workers + worker_slice.worker
            self._slots = islice(schedule.blocks(), first, None, worker_slice.num_workers)
        return next(self._slots)

    def _serving_stream(self, wanted: int) -> int | None:
        """Return the stream that fills a slot: the scheduled one, or a substitute if it ended."""
        if self._lanes[wanted].has_pack():
            return wanted
        amounts = [amount or 0 for amount in self._plan.amounts.amounts]
        total, num_slots = sum(amounts), sum(self._served) + 1
        owed = sorted(
            (self._served[stream] * total - amount * num_slots, stream)
            for stream, amount in enumerate(amounts)
            if amount
        )
        for _, stream in owed:
            if self._lanes[stream].has_pack():
                self._substituted += 1
                self._mixer.warn_of_end(wanted)
                return stream
        return None

    # State.

    def state_dict(self) -> State:
        """Return the worker's state between two batches, as JSON: addresses, no tokens."""
        mixing = self._mixer.state_dict()
        held, last = self._held.state_dict(), []
        for stream, address in sorted(self._held.last.items()):
            if self._samplers[stream].is_near(address[PASS], address[SAMPLE]):
                last.append(address)
        keys_of: dict[int, list[SampleKey]] = {}
        if self._replays:
            pending = [lane.pending.sample.key for lane in self._lanes if lane.pending is not None]
            keys_of = _by_stream({*pending, *map(key_of, [*held, *last])})
        return {
            "epoch": self._epoch,
            "num_batches": self.num_batches,
            "sources": [
                sampler.state_dict(keys_of.get(n)) for n, sampler in enumerate(self._samplers)
            ],
            "deficits": mixing["deficits"],
            "lanes": list(map(Lane.state_dict, self._lanes)),
            "held": held,
            "last": last,
            "is_stopping": mixing["is_stopping"],
            "served": list(self._served),
            "substituted": self._substituted,
            "num_packs": self._num_packs,
            "num_slots": self._num_slots,
            "counts": self._counts.tolist(),
            "high_water_tokens": self._held.high_water_tokens,
            "high_water_bytes": self._bytes.high_water,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a worker's state; buffered samples are read again."""
        try:
            self._restore(state)
        except StreampackError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ResumeError(
                "the state is damaged, or a source cannot resume from its own part of it "
                f"({type(error).__name__}: {error}); load what state_dict() returned, unchanged"
            ) from error

    def _restore(self, state: State) -> None:
        slicing = [lane["pending"] for lane in state["lanes"]]
        keys = {key_of(address) for address in [*state["held"], *state["last"]]}
        keys |= {key_of(each[0]) for each in slicing if each is not None}
        keys_of = _by_stream(sorted(keys))
        prepared: dict[SampleKey, CutSample] = {}
        for number, sampler in enumerate(self._samplers):
            again = sampler.load_state_dict(
                state["sources"][number],
                self._epoch,
                self._mixer.quotas[number],
                keys_of.get(number, ()),
            )
            for key, sample in again.items():
                prepared[key] = cut_sample(self._plan, self._mixer, key, sample)
        for address in [*state["held"], *state["last"]]:
            check_piece(address, prepared[key_of(address)], self._held, self._plan.streams)
        for address in state["held"]:
            found = prepared[key_of(address)]
            self._held.restore(address, found.ready, found.total)
        self._held.last = {int(address[0]): list(map(int, address)) for address in state["last"]}
        for lane, saved in zip(self._lanes, state["lanes"], strict=True):
            lane.load_state_dict(saved, prepared)
        check_packs([lane.packs() for lane in self._lanes], state["held"], self._plan)
        self._mixer.load_state_dict(state)
        self.num_batches = int(state["num_batches"])
        self._served = [int(n) for n, _ in zip(state["served"], self._served, strict=True)]
        self._substituted, self._num_packs = int(state["substituted"]), int(state["num_packs"])
        self._num_slots = int(state["num_slots"])
        self._counts[:] = np.array(state["counts"], np.int64).reshape(self._counts.shape)
        self._held.high_water_tokens = int(state["high_water_tokens"])
        self._bytes.high_water = int(state["high_water_bytes"])


def _by_stream(keys: Iterable[SampleKey]) -> dict[int, list[SampleKey]]:
    found: dict[int, list[SampleKey]] = {}
    for key in keys:
        found.setdefault(key[0], []).append(key)
    return found
