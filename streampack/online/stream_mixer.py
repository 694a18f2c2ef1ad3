"""Choose a worker's next samples over all streams, by their shares, for one packer at a time.

::

    source a --StreamSampler--.
    source b --StreamSampler--+-- deficits --> a window of samples --> the packer takes some of them
    source c --StreamSampler--'                                        the others are chosen again

A packer may complete its packs with fewer samples than were chosen. All that it does not certainly
need were in memory already, so no source is read further than necessary.

Cost: about 1 us per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from streampack.mix import Deficits
from streampack.online.item_decoder import DrawnSample
from streampack.online.plan import FlowPlan
from streampack.online.samples import encoded_length
from streampack.online.source_slice import SourceSlice, WorkerSlice
from streampack.online.stream_sampler import StreamSampler
from streampack.types import LENGTH, NUM_COLUMNS, PASS, START, STREAM, TOTAL, Int64Array

NUM_ADDED = 2  # tokens that may be added to a sample: BOS and EOS
PLACE_OF = attrgetter("pass_", "number")


@dataclass(slots=True, eq=False)
class Window:
    """Samples that a packer may get next."""

    tokens: int
    """Tokens that the packer certainly needs; one sample more is needed, too."""
    samples: int
    """The same, in samples."""
    expected: int
    """Tokens that it probably needs."""
    streams: list[int] = field(default_factory=list)
    drawn: list[DrawnSample] = field(default_factory=list)
    """Samples that fit a pack, and are plain arrays."""
    lengths: list[int] = field(default_factory=list)
    """Their tokens, with BOS and EOS."""
    last: tuple[int, DrawnSample] | None = None
    """Stream and sample of another one after these, which needs more work."""
    has_ended: bool = False
    """Whether nothing follows."""

    def rows(self) -> Int64Array:
        """Return the segment rows of the plain samples, shape (n, 6)."""
        rows = np.zeros((len(self.drawn), NUM_COLUMNS), np.int64)
        rows[:, STREAM] = self.streams
        rows[:, PASS:START] = list(map(PLACE_OF, self.drawn))
        rows[:, LENGTH] = rows[:, TOTAL] = self.lengths
        return rows


class StreamMixer:
    """Chooses samples of all streams in one worker and epoch; `parts` are its slices of them."""

    def __init__(
        self, plan: FlowPlan, place: WorkerSlice, parts: Sequence[SourceSlice], epoch: int
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._by_tokens = plan.mixing.weight_unit == "tokens"
        self._is_random = plan.mixing.batching_method == "random"
        packing = plan.packing
        self._adds_ids = packing.bos_id is not None or packing.eos_id is not None
        self.quotas = [plan.amounts.quota(n, epoch, part, place) for n, part in enumerate(parts)]
        self.samplers = [
            StreamSampler(stream, name, part, packing.max_seq_len - NUM_ADDED)
            for stream, name, part in zip(plan.streams, plan.names, parts, strict=True)
        ]
        amounts = [
            quota.amount if plan.amounts.are_quotas else plan.amounts.amounts[number]
            for number, quota in enumerate(self.quotas)
        ]
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

        Raises:
            DataError: If a source fails; the window holds the samples before.
        """
        while not window.has_ended:
            ended = self._fill(window, lane)
            if ended is None:
                break
            self._end(window, ended)

    def _fill(self, window: Window, lane: int) -> int | None:
        """Fill a window until it is full, or until a stream ends; return that stream."""
        tokens, samples, expected = window.tokens, window.samples, window.expected
        ahead = [window.streams.count(stream) for stream in range(len(self.samplers))]
        fixed = self._only if self._is_random else lane
        ended, num = None, len(window.drawn)
        while (is_needed := tokens >= 0 and samples >= 0) or expected > 0:
            stream = self._deficits.next() if fixed is None else fixed
            if stream is None or self._is_stopping:
                window.has_ended = is_needed
                break
            sample = self.samplers[stream].peek(ahead[stream], is_needed=is_needed)
            if sample is None:
                ended = stream if is_needed else None
                break
            if sample.plain is None:
                window.last = stream, sample
                break
            ahead[stream] += 1
            length = len(sample.plain[0])
            if self._adds_ids:
                length = encoded_length(sample.plain[0], self._plan.packing)
            window.streams.append(stream)
            window.drawn.append(sample)
            window.lengths.append(length)
            if fixed is None:
                self._deficits.serve(stream, length if self._by_tokens else 1)
            tokens, samples, expected = tokens - length, samples - 1, expected - length
        if self._ended is not None and (window.last or len(window.drawn) > num):
            self.warn_of_end(self._ended)
        window.tokens, window.samples, window.expected = tokens, samples, expected
        return ended

    def _end(self, window: Window, stream: int) -> None:
        """Note that a stream has ended, and with it perhaps all."""
        stops = self._plan.mixing.stop == "first_exhausted"
        self._is_stopping = stops and self.quotas[stream].amount != 0
        window.has_ended = self._is_stopping or not self._is_random
        if self._is_random:
            self._deficits.end(stream)
            self._ended = stream
            self._find_only()

    def take(self, window: Window, num: int) -> None:
        """Take the first `num` samples of a window, and leave the others to the next one."""
        if self._only is None and self._is_random:
            for stream, length in zip(window.streams[num:], window.lengths[num:], strict=True):
                self._deficits.serve(stream, -length if self._by_tokens else -1)
        for stream in set(window.streams[:num]):
            self.samplers[stream].take(window.streams[:num].count(stream))

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
        self._deficits.load_state_dict(state["deficits"])
        self._find_only()
        self._is_stopping = bool(state["is_stopping"])
