"""`PackedDataLoader`: plan in the training process, read in a thread or stateless workers.

::

    num_workers=0    a thread plans and reads batch 0, 1, ...       the default, nothing is copied

    num_workers=2    this process plans 0, 1, 2, ...                a few KB of integers a batch
                     worker 0 reads 0, 2, ...   worker 1 reads 1, 3, ...

Workers hold no state, so it does not matter how many there are or which one fails; the state is
keyed to the batch last delivered, not to what was planned or read ahead.

Cost: planning about 1 us a sample; a worker's hand-over about 1 ms a batch (torch's), a thread's 30
us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from streampack.assemble import Batch
from streampack.config import Packing, check_positive
from streampack.errors import ConfigError
from streampack.load.buffers import BYTES_PER_TOKEN, batches_ahead
from streampack.load.dataset import BatchReader, PackedStreamingDataset
from streampack.load.tally import Tally
from streampack.plan import DeviceBatch, EpochSequence, Progress
from streampack.read.prefetch import work_ahead
from streampack.types import Int64Array, State

__all__ = ["PackedDataLoader"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Losses:
    """What is not delivered as it was chosen."""

    dropped: Int64Array
    """Samples left out, per stream, shape (num_streams,)."""
    substituted: int = 0
    """Slots that another stream served."""

    def __add__(self, other: _Losses) -> _Losses:
        return _Losses(
            dropped=self.dropped + other.dropped, substituted=self.substituted + other.substituted
        )

    @classmethod
    def none(cls, num_streams: int) -> _Losses:
        """Return no losses."""
        return cls(dropped=np.zeros(num_streams, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Planned:
    """A planned batch that was not delivered yet."""

    batch: DeviceBatch
    after: Progress
    """Where the run stands once it is."""
    losses: _Losses
    """Of this iteration so far."""
    packer_tokens: int
    """The most that the packers held so far."""


class _Plans:
    """The plans of one iteration, noted as they are asked for."""

    def __init__(self, sequence: EpochSequence, packing: Packing) -> None:
        self.sequence = sequence
        self._drops = packing.overflow == "drop"
        # What the epoch had lost before this iteration, where it goes on from a state.
        self._before = _Losses(dropped=sequence.overlong, substituted=sequence.substituted)
        self.waiting: deque[_Planned] = deque()

    def __iter__(self) -> Iterator[DeviceBatch]:
        sequence = self.sequence
        while (batch := sequence.next()) is not None:
            after = Progress(
                epoch=batch.epoch, position=batch.position, snapshots=sequence.snapshots()
            )
            self.waiting.append(
                _Planned(
                    batch=batch,
                    after=after,
                    losses=_Losses(
                        dropped=self._dropped(),
                        substituted=sequence.substituted - self._before.substituted,
                    ),
                    packer_tokens=sequence.buffered_tokens,
                )
            )
            yield batch

    def _dropped(self) -> Int64Array:
        if not self._drops:
            return np.zeros_like(self._before.dropped)
        return self.sequence.overlong - self._before.dropped


class _LatestPlans:
    """What torch's DataLoader takes for its sampler: the plans of the iteration that begins."""

    plans: _Plans | None = None

    def __iter__(self) -> Iterator[DeviceBatch]:
        return iter(self.plans or ())


class _Reads(Dataset[Batch]):
    """What workers run: a plan for an index, a batch for an item."""

    def __init__(self, read: BatchReader) -> None:
        self._read = read

    def __getitem__(self, plan: Any) -> Any:
        return self._read(plan)


def _as_it_is(batch: Any) -> Any:
    # torch's default would turn the tuples of some formats into lists.
    return batch


class PackedDataLoader:
    """Iterates a `PackedStreamingDataset`: one epoch an iteration, and exact state.

    Args:
        dataset: What to iterate.
        num_workers: Processes that read; 0 plans and reads in a thread of this process.
        prefetch_factor: Batches that are read ahead, per worker.
        pin_memory: Put tensors into pinned memory, for quick copies to a GPU, if there is one.
        persistent_workers: Keep workers from one epoch to the next.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".

    Raises:
        ConfigError: If `dataset.buffers` cannot hold one batch a worker.
    """

    def __init__(
        self,
        dataset: PackedStreamingDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
    ) -> None:
        if not isinstance(dataset, PackedStreamingDataset):
            raise ConfigError(
                f"PackedDataLoader plans a PackedStreamingDataset, got {type(dataset).__name__}; "
                "iterate others with torch's DataLoader(dataset, batch_size=None)"
            )
        check_positive("prefetch_factor", prefetch_factor)
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} must be at least 0; 0 reads in threads")
        self.dataset = dataset
        self.num_workers = num_workers
        self._ahead = batches_ahead(
            dataset.buffers, dataset.footprint(num_workers), prefetch_factor
        )
        self._sampler = _LatestPlans()
        self._workers: DataLoader[Batch] | None = None
        self._pin_memory = pin_memory
        self._progress: Progress | None = None
        self._tally = Tally(dataset.recipe)
        # Left out and substituted in iterations before, and in the one under way.
        self._before = _Losses.none(len(dataset.stream_names))
        self._now = _Losses.none(len(dataset.stream_names))
        self._packer_tokens = 0
        self._most_waiting = 0
        if num_workers:
            self._workers = DataLoader(
                _Reads(dataset.reader()),
                sampler=self._sampler,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=num_workers,
                prefetch_factor=self._ahead,
                pin_memory=pin_memory,
                persistent_workers=persistent_workers,
                multiprocessing_context=multiprocessing_context,
            )

    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch: the one under way, or the next."""
        if self._progress is None:
            return len(self.dataset)
        return self.dataset.num_batches(self._progress.epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch, or go on from the state that was loaded."""
        sequence = self.dataset.begin()
        recipe = self.dataset.recipe
        if self._progress is None:
            self._tally = Tally(recipe)
            self._before = _Losses.none(len(recipe.streams))
        else:
            self._before = self._before + self._now
        self._now = _Losses.none(len(recipe.streams))
        self._progress = Progress(epoch=sequence.epoch, position=sequence.position)
        return self._deliver(_Plans(sequence, recipe.packing))

    def _deliver(self, plans: _Plans) -> Iterator[Batch]:
        sequence = plans.sequence
        batches: Iterator[Batch]
        if self._workers is not None:
            self._sampler.plans = plans
            batches = iter(self._workers)
        else:
            batches = work_ahead(plans, self.dataset.reader(), self._ahead)
            if self._pin_memory and torch.cuda.is_available():  # else there is nothing to pin for
                batches = map(_pin, batches)
        try:
            for batch in batches:
                self._note(plans.waiting.popleft(), len(plans.waiting))
                yield batch
            rolls_on = self.dataset.recipe.mixing.epoch_end == "carry"
            snapshots = sequence.snapshots() if rolls_on else []
            self._progress = Progress(epoch=sequence.epoch + 1, snapshots=snapshots)
        finally:
            sequence.close()

    def _note(self, planned: _Planned, num_waiting: int) -> None:
        self._progress = planned.after
        self._tally.add(planned.batch)
        self._now = planned.losses
        self._packer_tokens = max(self._packer_tokens, planned.packer_tokens)
        # torch asks for one more plan before it hands a batch over, threads do afterwards.
        self._most_waiting = max(self._most_waiting, num_waiting + (not self.num_workers))

    def state_dict(self) -> State:
        """Return where the run stands after the batch last delivered, as JSON."""
        if self._progress is None:
            return self.dataset.state_dict()
        return self.dataset.state_at(self._progress)

    def load_state_dict(self, state: State) -> None:
        """Go on from `state` at the next iteration.

        Raises:
            ResumeError: If it belongs to another sequence; the difference is named.
        """
        self.dataset.load_state_dict(state)
        self._progress = None

    def stats(self) -> dict[str, Any]:
        """Return what this rank delivered since the loader was made or a state was loaded.

        Per stream: samples and tokens delivered, split, truncated, dropped, shares and target; and
        packs, tokens, fill, slots served by another stream, high-water marks of the buffers.
        Dropped samples are counted as they are met, up to a chunk of 4,096 samples ahead, and each
        by one rank.
        """
        batch_tokens = self.dataset.footprint().batch_tokens
        waiting = self._most_waiting * batch_tokens
        per_worker = -(-self._most_waiting // max(self.num_workers, 1)) * batch_tokens
        packers = self._packer_tokens
        losses = self._before + self._now
        return self._tally.stats(losses.dropped.tolist()) | {
            "substituted": losses.substituted,
            "buffers": {
                "worker_tokens": per_worker + (0 if self.num_workers else packers),
                "worker_bytes": per_worker * BYTES_PER_TOKEN,
                "rank_tokens": waiting + packers,
            },
        }


def _pin(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _pin(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_pin(value) for value in batch)
    return batch.pin_memory() if hasattr(batch, "pin_memory") else batch
