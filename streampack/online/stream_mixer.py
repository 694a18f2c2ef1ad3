"""Choose a worker's next samples over all streams, by their shares, for one packer at a time.

::

    source a --StreamSampler--.
    source b --StreamSampler--+-- deficits --> a window of samples --> the packer takes some of them
    source c --StreamSampler--'                                        the others are chosen again

A packer may complete its packs with fewer samples than were chosen. All that it does not certainly
need were in memory already, so no source is read further than necessary.

Cost: about 0.2 us per sample of a list, else 1 us.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streampack.mix import Deficits
from streampack.mix.deficit import num_served
from streampack.online.plan import FlowPlan
from streampack.online.ready_samples import LENGTH_AT, PASS_AT, TAKEN_AT, ComplexSample
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.online.stream_sampler import StreamSampler
from streampack.types import LENGTH, NUM_COLUMNS, PASS, START, STREAM, TOTAL, Int64Array


@dataclass(slots=True, eq=False)
class Window:
    """Samples that a packer may get next."""

    tokens: int
    """Tokens that the packer certainly needs; one sample more is needed, too."""
    samples: int
    """The same, in samples."""
    expected: int
    """Tokens that it probably needs."""
    streams: array[int] = field(default_factory=lambda: array("q"))
    """The stream of each sample. They fit a pack and are plain arrays."""
    last: int | None = None
    """Stream of another one after these, which needs more work."""
    has_ended: bool = False
    """Whether nothing follows."""


class StreamMixer:
    """Chooses samples of all streams in one worker and epoch; `slices` are its slices of them."""

    def __init__(
        self, plan: FlowPlan, worker_slice: WorkerSlice, slices: Sequence[SourceSlice], epoch: int
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._by_tokens = plan.mixing.weight_unit == "tokens"
        self._is_random = plan.mixing.batching_method == "random"
        has_labels = any(stream.has_labels for stream in plan.streams)
        self.quotas = [
            plan.amounts.quota(n, epoch, slice_, worker_slice) for n, slice_ in enumerate(slices)
        ]
        self.samplers = [
            StreamSampler(stream, slice_, plan.packing, has_labels=has_labels)
            for stream, slice_ in zip(plan.streams, slices, strict=True)
        ]
        amounts: Sequence[int | None] = plan.amounts.amounts
        if plan.amounts.are_quotas:
            amounts = [quota.amount for quota in self.quotas]
        self._deficits = Deficits([amount or 0 for amount in amounts], plan.mixing.weight_unit)
        self._only: int | None = None  # the only stream left, if there is just one
        self._ended: int | None = None  # the last stream to end, until another is served
        self._is_stopping = False

    def begin(self) -> None:
        """Begin the epoch."""
        for sampler, quota in zip(self.samplers, self.quotas, strict=True):
            sampler.begin(self._epoch, quota)
        self._find_only()

    def choose(self, window: Window, lane: int) -> None:
        """Fill a window for a lane: all streams, or the stream of that number.

        If a source fails, the window holds the samples before.
        """
        while not window.has_ended:
            ended = self._fill(window, lane)
            if ended is None:
                break
            self._end(window, ended)

    def _fill(self, window: Window, lane: int) -> int | None:
        """Fill a window until it is full, or until a stream ends; return that stream."""
        tokens, samples, expected = window.tokens, window.samples, window.expected
        # Samples of each stream that are in the window already, and not taken yet.
        ahead = list(map(window.streams.count, range(len(self.samplers))))
        fixed = self._only if self._is_random else lane
        ended, num = None, len(window.streams)
        while (is_needed := tokens >= 0 and samples >= 0) or expected > 0:
            stream = self._deficits.next() if fixed is None else fixed
            if stream is None or self._is_stopping:
                window.has_ended = is_needed
                break
            sampler, before = self.samplers[stream], ahead[stream]
            # In one step, the samples that were read before and need no closer look.
            read = sampler.ready.tokens
            if len(read) > before + 1 and type(read[before]) is not ComplexSample:
                room = np.array([tokens, samples, expected])
                added = self._waiting(room, ahead, fixed)
                if len(added):
                    window.streams.frombytes(added.tobytes())
                    tokens, samples, expected = room.tolist()
                    continue
            # One sample: it may have to be read, parsed or tokenized first.
            length = sampler.peek(before, is_needed=is_needed)
            if length is None:
                ended = stream if is_needed else None
                break
            if not length:
                window.last = stream
                break
            ahead[stream] += 1
            window.streams.append(stream)
            # A stream that is alone, or has a packer of its own, needs no accounting.
            if fixed is None:
                self._deficits.serve(stream, length if self._by_tokens else 1)
            tokens, samples, expected = tokens - length, samples - 1, expected - length
        if self._ended is not None and (window.last is not None or len(window.streams) > num):
            self.warn_of_end(self._ended)
        window.tokens, window.samples, window.expected = tokens, samples, expected
        return ended

    def _waiting(self, room: Int64Array, ahead: list[int], fixed: int | None) -> Int64Array:
        """Return the streams of samples that were read before and fit into a window, shape (n,).

        `room`, as in `Deficits.serve_waiting`, and `ahead`, samples by stream, are updated. `fixed`
        is the only stream to add; None: the deficits decide.
        """
        if fixed is not None:
            num = num_served(self.samplers[fixed].waiting(ahead[fixed]), room)
            ahead[fixed] += num
            return np.full(num, fixed)
        added = self._deficits.serve_waiting(
            list(map(StreamSampler.waiting, self.samplers, ahead)), room
        )
        for stream, num in enumerate(np.bincount(added, minlength=len(ahead)).tolist()):
            ahead[stream] += num
        return added

    def drawn(self, window: Window) -> tuple[Int64Array, Sequence[list[Any]]]:
        """Return a window's samples.

        Returns:
            Their segment rows, shape (n, 6).
            A list of their tokens; if any stream has labels, also lists of labels and loss masks,
            where None stands for none.
        """
        streams = np.frombuffer(window.streams, np.int64)
        counts = np.bincount(streams).tolist()
        rows = np.zeros((len(streams), NUM_COLUMNS), np.int64)
        rows[:, STREAM] = streams
        columns: dict[int, tuple[list[Any], ...]] = {}
        for stream, count in enumerate(counts):
            if not count:
                continue
            lines, columns[stream] = self.samplers[stream].ready.first(count)
            places = slice(None) if count == len(streams) else streams == stream
            rows[places, PASS:START] = lines[:, PASS_AT:TAKEN_AT]
            rows[places, LENGTH] = rows[places, TOTAL] = lines[:, LENGTH_AT]
        if len(columns) == 1:
            return rows, columns[len(counts) - 1]
        return rows, interleaved(columns, window.streams)

    def _end(self, window: Window, stream: int) -> None:
        """Note that a stream has ended, and with it perhaps all."""
        stops = self._plan.mixing.stop == "first_exhausted"
        self._is_stopping = stops and self.quotas[stream].amount != 0
        window.has_ended = self._is_stopping or not self._is_random
        if self._is_random:
            self._deficits.end(stream)
            self._ended = stream
            self._find_only()

    def take(self, rows: Int64Array, num: int) -> None:
        """Take the first `num` samples of a window, and leave the others to the next one.

        `rows` are the window's segment rows, shape (n, 6).
        """
        num_streams, left = len(self.samplers), rows[num:]
        if len(left) and self._only is None and self._is_random:
            amounts = left[:, LENGTH] if self._by_tokens else np.ones(len(left))
            back = np.bincount(left[:, STREAM], weights=amounts, minlength=num_streams)
            self._deficits.undo(list(map(int, back)))
        taken = np.bincount(rows[:num, STREAM], minlength=num_streams).tolist()
        for sampler, count in zip(self.samplers, taken, strict=True):
            if count:
                sampler.take(count)

    def serve(self, stream: int, num_tokens: int) -> None:
        """Count the tokens of a sample after the plain ones."""
        if self._only is None and self._is_random:
            self._deficits.serve(stream, num_tokens if self._by_tokens else 1)

    def warn_of_end(self, stream: int) -> None:
        """Warn that the other streams continue without this one, so proportions no longer hold."""
        self._ended = None
        if not self._plan.amounts.are_quotas:
            self.samplers[stream].warn_of_end()

    def _find_only(self) -> None:
        """Note the only stream left, if there is just one: it needs no deficit accounting."""
        amounts = self._deficits.state_dict()["amounts"]
        live = [stream for stream, amount in enumerate(amounts) if amount]
        self._only = live[0] if self._is_random and len(live) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the deficits, and whether the epoch ends with its first stream."""
        return {"deficits": self._deficits.state_dict(), "is_stopping": self._is_stopping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; the samplers resume by themselves."""
        if min(state["deficits"]["amounts"]) < 0:
            raise ValueError("a stream's amount is negative")
        self._deficits.load_state_dict(state["deficits"])
        self._find_only()
        self._is_stopping = bool(state["is_stopping"])


def interleaved(
    columns: Mapping[int, Sequence[Sequence[Any]]], streams: Sequence[int]
) -> list[list[Any]]:
    """Return the columns of each stream's samples as columns in the order of `streams`.

    >>> interleaved({0: ["ab", "xy"], 1: ["c", "z"]}, [0, 1, 0])
    [['a', 'c', 'b'], ['x', 'z', 'y']]
    """
    merged = []
    for kind in zip(*columns.values(), strict=True):
        queues = dict(zip(columns, map(iter, kind), strict=True))
        merged.append(list(map(next, map(queues.__getitem__, streams))))
    return merged
