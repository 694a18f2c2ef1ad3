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
from streampack.online.plan import FlowPlan
from streampack.online.samples import Columns
from streampack.online.source_slice import SourceSlice
from streampack.online.stream_sampler import LENGTH_AT, NUMBER_AT, PASS_AT, StreamSampler
from streampack.online.worker_slice import WorkerSlice
from streampack.types import PASS, SAMPLE, STREAM, TOKENS, Int64Array


class Chunk(NamedTuple):
    """Samples in the order in which they are packed."""

    rows: Int64Array
    """Stream, pass, number and length of each, shape (n, 4)."""
    columns: Columns


class StreamMixer:
    """Chooses samples of all streams in one worker and epoch; `slices` are its slices of them."""

    def __init__(
        self, plan: FlowPlan, worker_slice: WorkerSlice, slices: Sequence[SourceSlice], epoch: int
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._by_tokens = plan.mixing.weight_unit == "tokens"
        self._is_random = plan.mixing.batching_method == "random"
        self.quotas = [
            plan.amounts.quota(n, epoch, slice_, worker_slice) for n, slice_ in enumerate(slices)
        ]
        self.samplers = [
            StreamSampler(
                stream,
                slice_,
                plan.packing,
                has_labels=plan.has_labels,
                has_extras=plan.has_extras,
            )
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
        for sampler, quota in zip(self.samplers, self.quotas, strict=True):
            sampler.begin(self._epoch, quota)
        self._find_only()

    def draw(self, lane: int, most_tokens: int, most_samples: int) -> Chunk | None:
        """Take samples for a lane, of all streams or of the stream of that number, if any are left.

        The last one may exceed `most_tokens`. If a source fails, the samples before that come
        first.
        """
        chunks: list[Chunk] = []
        room = np.array([most_tokens, most_samples])
        while room.min() > 0 and not self._is_stopping:
            fixed = self._only if self._is_random else lane
            stream = self._deficits.next() if fixed is None else fixed
            if stream is None:
                break
            try:
                has_more = self.samplers[stream].read()
            except StreampackError:  # but not errors raised by a signal handler
                if chunks:
                    break  # the next call fails again
                raise
            if has_more:
                if self._ended is not None:
                    self.warn_of_end(self._ended)
                chunks.append(self._take(fixed, stream, room))
            elif not self._end(stream):
                break
        if len(chunks) < 2:
            return chunks[0] if chunks else None
        columns: list[list[Any]] = [
            [value for rows in kind for value in rows]
            for kind in zip(*(chunk.columns for chunk in chunks), strict=True)
        ]
        tokens, labels, masks, extras = columns
        rows = np.concatenate([chunk.rows for chunk in chunks])
        return Chunk(rows, (tokens, labels, masks, extras))

    def _take(self, fixed: int | None, stream: int, room: Int64Array) -> Chunk:
        """Take the samples that wait, as many as fit; `stream` is that of the first one."""
        if fixed is not None:  # a stream that is alone, or has a packer of its own
            return self._of_one(fixed, num_served(self.samplers[fixed].waiting, room))
        served = self._deficits.serve_waiting([each.waiting for each in self.samplers], room)
        if not len(served):  # deficits beyond int64
            length = int(self.samplers[stream].waiting[0])
            self._deficits.serve(stream, length if self._by_tokens else 1)
            room -= (length, 1)
            return self._of_one(stream, 1)
        counts = np.bincount(served).tolist()
        if counts[-1] == len(served):
            return self._of_one(len(counts) - 1, len(served))
        parts = {n: self._of_one(n, count) for n, count in enumerate(counts) if count}
        rows = np.empty((len(served), TOKENS + 1), np.int64)
        for n, part in parts.items():
            rows[served == n] = part.rows
        columns = {n: part.columns for n, part in parts.items()}
        return Chunk(rows, interleaved(columns, served.tolist()))

    def _of_one(self, stream: int, num: int) -> Chunk:
        lines, columns = self.samplers[stream].take(num)
        rows = np.empty((num, TOKENS + 1), np.int64)
        rows[:, STREAM] = stream
        rows[:, PASS : SAMPLE + 1] = lines[:, PASS_AT : NUMBER_AT + 1]
        rows[:, TOKENS] = lines[:, LENGTH_AT]
        return Chunk(rows, columns)

    def _end(self, stream: int) -> bool:
        stops = self._plan.mixing.stop == "first_exhausted"
        self._is_stopping = stops and self.quotas[stream].amount != 0
        if not self._is_random:
            return False
        self._deficits.end(stream)
        self._ended = stream
        self._find_only()
        return True

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
        return {"deficits": self._deficits.state_dict(), "is_stopping": self._is_stopping}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._deficits.load_state_dict(state["deficits"])
        self._find_only()
        self._is_stopping = bool(state["is_stopping"])


def interleaved(columns: Mapping[int, Columns], streams: Sequence[int]) -> Columns:
    """Return the columns of each stream's samples as columns in the order of `streams`.

    >>> interleaved({0: (["a", "b"], [], [], []), 1: (["c"], [], [], [])}, [0, 1, 0])
    (['a', 'c', 'b'], [], [], [])
    """
    merged: list[list[Any]] = []
    for kind in zip(*columns.values(), strict=True):
        queues = dict(zip(columns, map(iter, kind), strict=True))
        is_used = any(kind)
        merged.append(list(map(next, map(queues.__getitem__, streams))) if is_used else [])
    tokens, labels, masks, extras = merged
    return tokens, labels, masks, extras
