"""Choose a worker's next samples over all streams, by their shares.

::

    source a --StreamSampler--.
    source b --StreamSampler--+-- deficits --> a chunk of samples, in their order
    source c --StreamSampler--'

Cost: about 0.05 us per sample, and 40 us per chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streampack.errors import StreampackError
from streampack.mix.deficit import Deficits, num_served
from streampack.online.item_decoder import Columns
from streampack.online.plan import FlowPlan
from streampack.online.source_slice import SourceSlice
from streampack.online.stream_sampler import SourcePosition, StreamSampler
from streampack.types import TOKENS, Int64Array, State


class Mark(NamedTuple):
    """Where the streams of a lane are."""

    positions: list[SourcePosition]
    deficits: State


class StreamMixer:
    """Chooses samples of all streams in one worker and epoch; `slices` are its slices of them."""

    def __init__(self, plan: FlowPlan, slices: Sequence[SourceSlice], epoch: int) -> None:
        self._plan = plan
        self._epoch = epoch
        self._is_random = plan.mixing.batching_method == "random"
        self._chooses = self._is_random and len(slices) > 1
        self.quotas = [plan.amounts.quota(n, epoch, slice_) for n, slice_ in enumerate(slices)]
        self.samplers = [
            StreamSampler(plan, number, slice_, quota)
            for number, (slice_, quota) in enumerate(zip(slices, self.quotas, strict=True))
        ]
        amounts: Sequence[int | None] = plan.amounts.amounts
        if plan.amounts.are_quotas:
            amounts = [quota.amount for quota in self.quotas]
        self._deficits = Deficits([amount or 0 for amount in amounts], plan.mixing.weight_unit)
        self._ended: int | None = None  # the last stream to end, until another is served
        self.is_stopping = False
        """Whether a stream has ended that ends the epoch."""

    def begin(self) -> None:
        for sampler in self.samplers:
            sampler.begin(self._epoch)

    def draw(
        self, lane: int, most_tokens: int, most_samples: int
    ) -> tuple[Int64Array, Columns] | None:
        """Take samples for a lane, of all streams or of the stream of that number, if any are left.

        The last one may exceed `most_tokens`. If a source fails, the samples before that come
        first. Return their rows, shape (n, 4), and columns.
        """
        chunks: list[tuple[Int64Array, Columns]] = []
        room = np.array([most_tokens, most_samples])
        while not self.is_stopping:
            stream, chunk = self._take_waiting(lane, room)
            if chunk is not None:
                chunks.append(chunk)
                if self._ended is not None:
                    self.warn_of_end(self._ended)
            if stream is None or room.min() <= 0:
                break
            try:
                has_more = self.samplers[stream].read()
            except StreampackError:  # but not errors raised by a signal handler
                if chunks:
                    break  # the next call fails again
                raise
            if not has_more and not self._end(stream):
                break
        if len(chunks) < 2:
            return chunks[0] if chunks else None
        rows, columns = zip(*chunks, strict=True)
        merged = [[value for part in kind for value in part] for kind in zip(*columns, strict=True)]
        return np.concatenate(rows), merged

    def _end(self, stream: int) -> bool:
        """Note that a stream has ended; return whether others may be next in its lane."""
        stops = self._plan.mixing.stop == "first_exhausted"
        self.is_stopping = stops and self.quotas[stream].amount != 0
        if self._is_random:
            self._deficits.end(stream)
            self._ended = stream
        return self._chooses

    def _take_waiting(
        self, lane: int, room: Int64Array
    ) -> tuple[int | None, tuple[Int64Array, Columns] | None]:
        """Take the samples that wait, as many as fit; return the stream whose turn it is then."""
        samplers = self.samplers
        if not self._chooses:  # a stream that is alone, or has a packer of its own
            num = num_served(samplers[lane].waiting, room)
            return lane, samplers[lane].take(num) if num else None
        served, stream = self._deficits.serve_waiting([each.waiting for each in samplers], room)
        if not len(served):
            return stream, None
        counts = np.bincount(served).tolist()
        parts = {n: samplers[n].take(count) for n, count in enumerate(counts) if count}
        if len(parts) == 1:
            return stream, parts[len(counts) - 1]
        rows = np.empty((len(served), TOKENS + 1), np.int64)
        for n, (own, _) in parts.items():
            rows[served == n] = own
        columns = {n: own for n, (_, own) in parts.items()}
        return stream, (rows, interleaved(columns, served.tolist()))

    def warn_of_end(self, stream: int) -> None:
        """Warn that the other streams continue without this one, so proportions no longer hold."""
        self._ended = None
        if not self._plan.amounts.are_quotas:
            self.samplers[stream].warn_of_end()

    # State.

    def _samplers_of(self, lane: int) -> list[StreamSampler]:
        return self.samplers if self._is_random else [self.samplers[lane]]

    def mark(self, lane: int) -> Mark:
        """Return where the streams of a lane are."""
        positions = [sampler.position for sampler in self._samplers_of(lane)]
        return Mark(positions, self._deficits.state_dict())

    def state_dict(self, lane: int, mark: Mark) -> tuple[State, list[Any]]:
        """Return a lane's state that continues at a mark, and its sources' own states."""
        samplers = self._samplers_of(lane)
        saved = [each.state_dict(at) for each, at in zip(samplers, mark.positions, strict=True)]
        streams = [state for state, _ in saved]
        return {"streams": streams, "deficits": mark.deficits}, [own for _, own in saved]

    def load_state_dict(self, lane: int, state: State, sources: Sequence[Any]) -> None:
        """Let the streams of a lane continue where a state of it starts."""
        samplers = self._samplers_of(lane)
        for sampler, saved, own in zip(samplers, state["streams"], sources, strict=True):
            sampler.load_state_dict(saved, own)
        self._deficits.load_state_dict(state["deficits"])


def interleaved(columns: Mapping[int, Columns], streams: Sequence[int]) -> Columns:
    """Return the columns of each stream's samples as columns in the order of `streams`.

    >>> interleaved({0: [["a", "b"], [], [], []], 1: [["c"], [], [], []]}, [0, 1, 0])
    [['a', 'c', 'b'], [], [], []]
    """
    merged: Columns = []
    for kind in zip(*columns.values(), strict=True):
        queues = dict(zip(columns, map(iter, kind), strict=True))
        is_used = any(kind)
        merged.append(list(map(next, map(queues.__getitem__, streams))) if is_used else [])
    return merged
