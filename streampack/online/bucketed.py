"""`BucketedIterableDataset`: padded batches of similar length from any iterables of samples.

::

    source a --.                                            one row for each sample
    source b --+-- mixing --> buckets by length (bounded) --> [a7 a7 a7 a7 ..]   rows * longest
    source c --'                                              [c2 c2 c2 c2 c2]   <= max_tokens

Cost: 10 to 20 us per sample, plus the source. Memory: `buffer_samples` samples and one batch in
each worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from streampack.config import Bucketing, Buffers, Mixing, Order
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError
from streampack.online.dataset import FlowDataset, check_options, flow_plan
from streampack.online.plan import Steps, check_steps
from streampack.runtime.arguments import check_configs, with_hints
from streampack.streams import IterableStream
from streampack.streams.registry import check_streams
from streampack.world import World


class BucketedIterableDataset(FlowDataset):
    """Iterables of samples, mixed and batched by length on the fly, one row for each sample.

    Args:
        streams: The sources and their weights; streams without weights count equally.
        bucketing: How samples share batches.
        mixing: The share of each stream, and the batches it appears in; a batch counts as a pack.
        order: With shuffle, indexed sources (lists, map-style datasets) are shuffled by the seed;
            None: they are read in stored order. Other sources keep their own order.
        buffers: Memory limits.
        world: This process's rank; None: from torch.distributed if it is initialised, or from
            torchrun's variables.
        steps: Where a loop ends on all ranks, a number or "equal"; as in `PackedIterableDataset`.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: as `PackedIterableDataset`.

    The oldest buffered sample opens each batch, and the samples nearest in length fill it. So no
    sample waits for more than `buffer_samples` batches, however long it is.

    Batches have the same keys as packed batches, rows as long as their longest sample, and
    `seq_lens`, the number of tokens in each row, int64, shape (n,). `document_ids` are 1 where
    there are tokens. `position` counts batches over all ranks and workers as if they advanced in
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
        if not isinstance(bucketing, Bucketing):
            raise ConfigError(
                f"bucketing=<{type(bucketing).__name__}> is not a Bucketing; pass bucketing="
                "streampack.Bucketing(max_tokens=8192)"
            )
        check_streams(streams, IterableStream)
        check_configs(mixing=mixing, order=order, buffers=buffers, world=world)
        check_options(type(self).__name__, mixing, order, buffers)
        if world is not None:
            given = {"context_parallel": world.context_parallel}
            check_combination({"dataset": type(self).__name__, **given})
        for stream in streams:
            if "seq_lens" in {*stream.token_fields, *stream.payloads}:
                raise ConfigError(
                    f"stream {stream.name!r} has an extra field 'seq_lens', which is a key of "
                    "every batch already; give it another name in the source"
                )
        plan = flow_plan(
            streams,
            bucketing.packing(),
            mixing or Mixing(),
            order,
            bucketing=bucketing,
            steps=check_steps(steps, mixing),
        )
        super().__init__(plan, buffers, world)
