"""Datasets over any iterables of samples, which are mixed, and packed or bucketed as they arrive.

::

    source a --.                                       one pipeline in each worker of each rank:
    source b --+-- mixing --> packers (bounded) --> device batches
    source c --'          '-> buckets by length --> batches of one row for each sample

Cost: about 1 us per sample of a list, 2.5 us of a generator, and 5 ns per token; more with extra
fields or buckets, plus the source. Memory: the packers' bounds, one batch and one chunk of samples
per worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from streampack._checks import read_count
from streampack.batch.formats.registry import BatchFormat, Formatter, check_format, to_native
from streampack.batch.slices import context_slice
from streampack.config import Bucketing, Buffers, Mixing, Order, Packing
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError
from streampack.online.engine import OnlineEngine
from streampack.online.epoch_quota import epoch_amounts
from streampack.online.loading import OnlineLoading
from streampack.online.plan import FlowPlan, Steps
from streampack.pack.cost import check_max_cost
from streampack.runtime.arguments import check_batch_size, check_configs, with_hints
from streampack.runtime.resumable import ResumableDataset
from streampack.runtime.torch_worker import worker_here
from streampack.runtime.whole_batch import whole
from streampack.runtime.worker_processes import WorkerOptions
from streampack.streams import IterableStream
from streampack.streams.registry import check_streams, unique_names
from streampack.world import World

MOST_WAITING = 1024  # samples for each packer; a window has as many


class FlowDataset(ResumableDataset[OnlineEngine]):
    """Base of the online datasets; `convert` converts native batches to the requested format."""

    def __init__(
        self,
        plan: FlowPlan,
        buffers: Buffers | None,
        world: World | None,
        convert: Formatter = to_native,
    ) -> None:
        self.buffers = buffers or Buffers()
        found = world or World.from_env(os.environ)
        context = context_slice(found, plan.packing, convert, plan.batch_tokens)
        engine = OnlineEngine(
            plan, self.buffers, found, convert, context, finds_world=world is None
        )
        super().__init__(engine, list(plan.streams), list(plan.names))
        self._session: OnlineLoading | None = None

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch at the first batch, or resume; in a torch worker, its share of it."""
        if worker_here():
            return self._engine.batches()
        self._engine.check_world()
        if self._session is None or self._session.engine is not self._engine:  # or of a copy
            options = WorkerOptions(num_workers=0, prefetch_factor=1, prefetch_threads=0)
            self._session = OnlineLoading(self._engine, options, whole)
        return iter(self._session)


class PackedIterableDataset(FlowDataset):
    """Iterables of samples, mixed and packed on the fly.

    Args:
        streams: The sources and their weights; streams without weights count equally.
        packing: How samples share packs.
        mixing: The share of each stream, the batches it appears in, and where an epoch ends.
        order: With shuffle, indexed sources (lists, map-style datasets) are shuffled by the seed;
            None: they are read in stored order. Other sources keep their own order. With
            `pack_shuffle`, each worker also shuffles this many packs together, or as many as
            `buffers` allow; by default packs keep their order.
        buffers: Memory limits.
        batch_size: Packs in a device batch.
        batch_format: The batch layout: "native", a trainer's format by name such as "hf", or a
            function of the native batch; see `streampack.formats`.
        world: This process's rank. By default from torch.distributed if it is initialised, or from
            torchrun's variables. With `context_parallel`, each rank packs whole rows and delivers
            its slice of them, so the ranks that share rows must have the same sources.
        steps: Where a loop ends, so that all ranks take as many steps. A number: after this many.
            "equal": when the first rank has delivered its epoch, agreed upon through
            torch.distributed at every step. The next loop continues where it ended, and nothing is
            lost. None: with the epoch of each rank.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: if a sample is invalid, a source fails or is empty, or a second
            epoch needs a source that can be iterated only once, such as a generator.

    Batches have the keys of `PackedStreamingDataset` batches, and the streams' extra fields.
    `position` counts packs over all ranks and workers as if they advanced in step. Iterate with
    `PackedDataLoader`, torchdata's ``StatefulDataLoader`` or torch's ``DataLoader(dataset,
    batch_size=None)``.

    Without `steps`, ranks may take unequal numbers of steps in an epoch: each packs its own
    samples, and the number of packs they fill is not known in advance. Where ranks synchronise at
    every step (DDP, FSDP), set `steps` and iterate with `PackedDataLoader`.

    >>> dataset = PackedIterableDataset(
    ...     [IterableStream([[1, 2, 3], [4, 5]])], packing=Packing(max_seq_len=4), batch_size=2)
    >>> next(iter(dataset))["tokens"].tolist()
    [[1, 2, 3, 0], [4, 5, 0, 0]]
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - the public face; four of them are configs
        self,
        streams: Sequence[IterableStream],
        *,
        packing: Packing,
        mixing: Mixing | None = None,
        order: Order | None = None,
        buffers: Buffers | None = None,
        batch_size: int = 1,
        batch_format: BatchFormat = "native",
        world: World | None = None,
        steps: Steps | None = None,
    ) -> None:
        check_configs(packing=packing, world=world)
        size = check_batch_size(batch_size, packing.max_seq_len)
        name = type(self).__name__
        plan = flow_plan(name, streams, packing, mixing, order, buffers, steps, batch_size=size)
        super().__init__(plan, buffers, world, check_format(batch_format, packing, plan.batch_size))


class BucketedIterableDataset(FlowDataset):
    """Iterables of samples, mixed and batched by length on the fly, one row for each sample.

    Args:
        streams: The sources and their weights; streams without weights count equally.
        bucketing: How samples share batches.
        mixing: The share of each stream, and the batches it appears in; a batch counts as a pack.
        order: With shuffle, indexed sources (lists, map-style datasets) are shuffled by the seed;
            None: they are read in stored order. Other sources keep their own order.
        buffers: Memory limits.
        world: This process's rank. By default from torch.distributed if it is initialised, or from
            torchrun's variables.
        steps: Where a loop ends on all ranks, a number or "equal"; as in `PackedIterableDataset`.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: as `PackedIterableDataset`.

    The oldest buffered sample opens each batch, and the samples nearest in length fill it. So no
    sample waits for more than `buffer_samples` batches, however long it is.

    Batches have the same keys as packed batches, rows as long as their longest sample, and
    `seq_lens`, the number of tokens in each row, int64, shape (n,). `document_ids` are 1 for tokens
    and 0 for padding. `position` counts batches over all ranks and workers as if they advanced in
    step. Iterate as over a `PackedIterableDataset`. States are exact after any batch, with the same
    number of ranks and workers. Without `steps`, ranks may take unequal numbers of steps.

    >>> dataset = BucketedIterableDataset(
    ...     [IterableStream([[1, 2, 3], [4, 5], [6]])], bucketing=Bucketing(max_tokens=6))
    >>> [batch["tokens"].tolist() for batch in dataset]
    [[[1, 2, 3], [4, 5, 0]], [[6]]]
    """

    @with_hints
    def __init__(
        self,
        streams: Sequence[IterableStream],
        *,
        bucketing: Bucketing,
        mixing: Mixing | None = None,
        order: Order | None = None,
        buffers: Buffers | None = None,
        world: World | None = None,
        steps: Steps | None = None,
    ) -> None:
        check_configs(bucketing=bucketing, world=world)
        name, packing = type(self).__name__, bucketing.packing()
        if world is not None:
            check_combination({"dataset": name, "context_parallel": world.context_parallel})
        plan = flow_plan(name, streams, packing, mixing, order, buffers, steps, bucketing=bucketing)
        super().__init__(plan, buffers, world)


def flow_plan(  # noqa: PLR0913 - the arguments of both datasets
    dataset: str,
    streams: Sequence[IterableStream],
    packing: Packing,
    mixing: Mixing | None = None,
    order: Order | None = None,
    buffers: Buffers | None = None,
    steps: Steps | None = None,
    *,
    batch_size: int = 1,
    bucketing: Bucketing | None = None,
) -> FlowPlan:
    """Check the options of a dataset of this class, and return its plan.

    Without an order, samples are read in stored order.
    """
    check_streams(streams, IterableStream)
    check_configs(mixing=mixing, order=order, buffers=buffers)
    is_shuffled = order is not None and order.shuffle
    mixing, order = mixing or Mixing(), order or Order()
    check_combination(
        {
            "dataset": dataset,
            "epoch_end": mixing.epoch_end,
            "global_batch_size": mixing.global_batch_size,
            "max_repeats": mixing.max_repeats,
            "num_lanes": order.num_lanes,
            "pack_shuffle": order.pack_shuffle,
            "cache_limit": (buffers or Buffers()).cache_limit,
        }
    )
    if steps is not None:
        if steps != "equal":
            way_out = "write a number of steps, such as 1000, or 'equal'"
            steps = read_count("steps", steps, way_out)
        given = {"stop": mixing.stop, "batching_method": mixing.batching_method}
        check_combination({"steps": steps, **given})
    _check_fields(streams, packing)
    limit = packing.buffer_samples or MOST_WAITING
    packing = replace(packing.resolved(), buffer_samples=limit)
    check_max_cost(packing)
    names = unique_names(
        [stream.name or f"stream-{number}" for number, stream in enumerate(streams)]
    )
    # Named as in messages and reports.
    named = tuple(replace(stream, name=name) for stream, name in zip(streams, names, strict=True))
    return FlowPlan(
        streams=named,
        names=tuple(names),
        packing=packing,
        mixing=mixing,
        amounts=epoch_amounts(named, mixing, order.seed),
        batch_size=batch_size,
        seed=order.seed,
        shuffle_block_size=order.block_size if is_shuffled else None,
        bucketing=bucketing,
        steps=steps,
        pack_shuffle=order.pack_shuffle or 0,
    )


def _check_fields(streams: Sequence[IterableStream], packing: Packing) -> None:
    """Refuse extra fields that cannot share a batch, or that the packing method would cut."""
    dtypes: dict[str, str] = {}
    for stream in streams:
        for name, dtype in stream.token_fields.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise ConfigError(
                    f"token_fields: {name!r} is {dtypes[name]!r} in one stream and {dtype!r} in "
                    "another; a batch has one array for both, so give it one dtype"
                )
        payloads = stream.payloads.payloads or None
        check_combination({"Stream(payloads)": payloads, "method": packing.method})
