"""`PackedIterableDataset`: any iterables of samples in, mixed and packed as they come.

::

    source a --.
    source b --+-- largest deficit --> packer (bounded) --> device batches
    source c --'   (samples or tokens)

Each worker of each rank takes every n-th sample of each source and packs with its own bounded
buffer. A pack leaves as soon as it is full. Lengths are not known ahead, so nothing is planned: for
MDS streams `PackedStreamingDataset` is elastic and exact where this is not.

Cost: about 20 us a sample (the packer is asked after each), plus the source. Memory: the packer's
bound and one batch a worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, islice
from math import lcm
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from streampack.assemble import Batch, BatchFormat, check_format, make_batch
from streampack.config import Buffers, Mixing, Packing
from streampack.errors import ConfigError, DataError
from streampack.load.arguments import check_batch_size, check_configs, check_streams
from streampack.load.buffers import Footprint, batches_ahead
from streampack.load.build import unique_names
from streampack.load.held import HeldSamples, shifted_labels
from streampack.load.ledger import EpochLedger
from streampack.mix import Weight, check_weights, exact_share, scaled_shares
from streampack.pack import fit_samples, make_packer
from streampack.read.targets import labels_are_shifted
from streampack.streams import IterableSample, IterableStream
from streampack.types import Packs
from streampack.world import World

__all__ = ["PackedIterableDataset"]

SCALE = 1 << 30
NUM_LOOKED_AT = 64  # samples that tell whether labels are shifted


class _Source:
    """One worker's part of one source: every `stride`-th sample, as arrays."""

    def __init__(self, stream: IterableStream, name: str, first: int, stride: int) -> None:
        self._stream = stream
        self._name = name
        self._items: Iterator[tuple[int, object]] = islice(
            enumerate(stream.source), first, None, stride
        )
        # labels_shifted: whether labels[i] speaks of token i + 1; None until the first sample.
        self.labels_shifted = stream.labels_shifted if stream.labels else False

    def next(self) -> tuple[int, IterableSample] | None:
        """Return the next sample and its number in the source; None at the end."""
        if self.labels_shifted is None:
            self._look_at_labels()
        try:
            number, item = next(self._items)
        except StopIteration:
            return None
        return number, self._stream.sample(item, number)

    def _look_at_labels(self) -> None:
        """Tell from the first samples whether labels are shifted."""
        first = list(islice(self._items, NUM_LOOKED_AT))
        self._items = chain(first, self._items)
        samples = [self._stream.sample(item, number) for number, item in first]
        if not samples:
            return
        self.labels_shifted = labels_are_shifted(
            (sample.tokens, sample.labels) for sample in samples if sample.labels is not None
        )
        if self.labels_shifted is None:
            raise DataError(
                f"stream {self._name!r}: the labels of its first samples do not tell whether they "
                "are shifted; say so with labels_shifted=True (labels[i] is for tokens[i + 1]) or "
                "labels_shifted=False (for tokens[i])"
            )


class _Mixer:
    """Asks the source that is most behind its share for the next sample."""

    def __init__(self, sources: list[_Source], proportions: list[Fraction], unit: str) -> None:
        self._sources = sources
        whole = lcm(*(p.denominator for p in proportions))
        self._shares = scaled_shares([int(p * whole) for p in proportions], SCALE)
        self._deficits = np.zeros(len(sources), np.int64)
        self._live = self._shares > 0
        self._by_tokens = unit == "tokens"

    def next(self) -> tuple[int, int, IterableSample] | None:
        """Return stream, number and sample; None once all sources are at their end."""
        while self._live.any():
            stream = int(np.argmax(np.where(self._live, self._deficits + self._shares, -(1 << 62))))
            found = self._sources[stream].next()
            if found is None:
                self._live[stream] = False
                continue
            amount = len(found[1].tokens) if self._by_tokens else 1
            self._deficits += self._shares * amount
            self._deficits[stream] -= SCALE * amount
            return stream, *found
        return None


class PackedIterableDataset(IterableDataset[Batch]):
    """Iterables of tokenized samples, mixed and packed on the fly.

    Args:
        streams: The sources and their proportions; without any, all count the same.
        packing: How samples share packs.
        mixing: weight_unit and epoch_end ("pad" or "drop"); packs mix all streams.
        buffers: How much may be resident at once.
        batch_size: Packs in a device batch.
        batch_format: What batches look like: "native", or a trainer's format by name, such as
            "hf", or a function of the native batch; see `streampack.formats`.
        world: This process among the others; None: what torchrun's variables say.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: a sample is not what it should be, or a source that can be
            iterated only once, such as a generator, is asked for a second epoch.

    Batches are those of `PackedStreamingDataset`; `position` counts the packs of all ranks and
    workers as if they kept step. Iterate it with torch's ``DataLoader(dataset, batch_size=None)``.

    Ranks may take unequal numbers of steps in an epoch: each packs its own samples, and nobody
    knows beforehand how many packs these fill. Where ranks wait for each other at every step (DDP,
    FSDP), end the epoch at a number of steps that all reach, or stop together once one rank is at
    its end.

    >>> dataset = PackedIterableDataset(
    ...     [IterableStream([[1, 2, 3], [4, 5]])], packing=Packing(max_seq_len=4), batch_size=2)
    >>> next(iter(dataset))["tokens"].tolist()
    [[1, 2, 3, 0], [4, 5, 0, 0]]
    """

    def __init__(
        self,
        streams: Sequence[IterableStream],
        *,
        packing: Packing,
        mixing: Mixing | None = None,
        buffers: Buffers | None = None,
        batch_size: int = 1,
        batch_format: BatchFormat = "native",
        world: World | None = None,
    ) -> None:
        super().__init__()
        check_streams(streams, IterableStream)
        check_configs(packing=packing, mixing=mixing, buffers=buffers, world=world)
        batch_size = check_batch_size(batch_size)
        self._convert = check_format(batch_format, packing)
        self._mixing = mixing or Mixing()
        _check_mixing(self._mixing)
        names = [stream.name or f"stream-{number}" for number, stream in enumerate(streams)]
        self.stream_names = unique_names(names)
        weights = [
            Weight(name=name, proportion=stream.proportion)
            for name, stream in zip(self.stream_names, streams, strict=True)
        ]
        check_weights(weights)
        self._proportions = [
            exact_share(1 if weight.proportion is None else weight.proportion) for weight in weights
        ]
        self._streams = tuple(streams)
        self._packing = packing
        self._buffers = buffers or Buffers()
        self._batch_size = batch_size
        self._world = world or World.from_env(os.environ)
        self._ledger = EpochLedger()
        self._num_iterations = 0
        self._has_read = False
        self._check_buffers(0)

    def _check_buffers(self, num_workers: int) -> None:
        footprint = Footprint(
            packer_tokens=self._packing.buffer_limit,
            batch_tokens=self._batch_size * self._packing.max_seq_len,
            num_workers=num_workers,
            plans_in_workers=num_workers > 0,
        )
        batches_ahead(self._buffers, footprint, 1)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one; sources that can be iterated again start again."""
        self._ledger.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch; in a torch worker, this worker's share of it."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        self._check_buffers(info.num_workers if info else 0)
        token = info.seed - info.id if info else os.getpid()
        epoch = self._ledger.begin(worker, f"{token}:{self._num_iterations}")
        self._num_iterations += 1
        return self._batches(epoch, worker, num_workers)

    def _batches(self, epoch: int, worker: int, num_workers: int) -> Iterator[Batch]:
        held = HeldSamples(self._packing)
        waiting = Packs.none()
        step = worker
        for packs in self._packs(held, epoch, worker, num_workers):
            waiting = Packs.join([waiting, packs])
            while len(waiting) >= self._batch_size:
                yield self._batch(held, waiting.slice(0, self._batch_size), epoch, step)
                waiting = waiting.slice(self._batch_size, len(waiting))
                step += num_workers
        if len(waiting) and self._mixing.epoch_end == "pad":
            yield self._batch(held, waiting, epoch, step)

    def _check_sources(self, epoch: int) -> None:
        """Refuse to read a source again that goes on where it was left, such as a generator."""
        has_read, self._has_read = self._has_read, True
        for stream, name in zip(self._streams, self.stream_names, strict=True):
            if has_read and isinstance(stream.source, Iterator):
                raise DataError(
                    f"stream {name!r}: its source ({type(stream.source).__name__}) can be iterated "
                    f"only once and was, so epoch {epoch} would lack its samples; pass something "
                    "that can be iterated again: a list, a dataset, or an object whose __iter__ "
                    "makes a new generator"
                )

    def _batch(self, held: HeldSamples, packs: Packs, epoch: int, step: int) -> Any:
        return self._convert(
            make_batch(
                held.rows(packs, self._batch_size),
                packs,
                epoch=epoch,
                position=(step + 1) * self._batch_size * self._world.num_devices,
                positions=self._packing.positions,
            )
        )

    def _packs(
        self, held: HeldSamples, epoch: int, worker: int, num_workers: int
    ) -> Iterator[Packs]:
        """Yield packs as they become full, then what the buffer still holds."""
        packing, world = self._packing, self._world
        self._check_sources(epoch)
        first, stride = world.place * num_workers + worker, world.num_devices * num_workers
        sources = [
            _Source(stream, name, first, stride)
            for stream, name in zip(self._streams, self.stream_names, strict=True)
        ]
        mixer = _Mixer(sources, self._proportions, self._mixing.weight_unit)
        packer = make_packer(packing)
        while (found := mixer.next()) is not None:
            stream, number, sample = found
            tokens, labels = shifted_labels(
                sample, packing, labels_shifted=bool(sources[stream].labels_shifted)
            )
            row = np.array([[stream, epoch, number, len(tokens)]])
            segments = fit_samples(row, packing.max_seq_len, packing.overflow, self.stream_names)
            if len(segments):
                kept = int(segments[0, -1])
                held.hold((stream, epoch, number), tokens, labels, kept)
                yield packer.add(segments)
        yield packer.flush()


def _check_mixing(mixing: Mixing) -> None:
    """Refuse what the buffered way cannot do."""
    for key, works in {
        "batching_method": ("random",),
        "epoch_end": ("pad", "drop"),
        "epoch_size": (None,),
        "global_batch_size": (None,),
    }.items():
        value = getattr(mixing, key)
        if value not in works:
            raise ConfigError(
                f"PackedIterableDataset cannot do {key}={value!r}, only "
                f"{' or '.join(map(repr, works))}; PackedStreamingDataset can, from MDS streams"
            )
