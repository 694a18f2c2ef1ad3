"""`BucketedIterableDataset`: any iterables of samples in, batches of similar length out, padded.

::

    source a --.                                            one row for each sample
    source b --+-- mixing --> buckets by length (bounded) --> [a7 a7 a7 a7 ..]   rows * longest
    source c --'                                              [c2 c2 c2 c2 c2]   <= max_tokens

For models that cannot take packs. Everything but the packer is `PackedIterableDataset`'s: sources,
weights, workers, states.

Cost: 10 to 20 us a sample, plus the source. Memory: in each worker `buffer_samples` samples and one
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from streampack.config import Buffers, Mixing, Order
from streampack.errors import ConfigError
from streampack.load.arguments import check_configs, check_streams, with_hints
from streampack.load.buckets import Bucketing
from streampack.load.iterable import FlowDataset, check_fields, check_options, flow_plan
from streampack.streams import IterableStream
from streampack.world import World

__all__ = ["BucketedIterableDataset"]


class BucketedIterableDataset(FlowDataset):
    """Iterables of samples, mixed and batched by length on the fly, one row for each sample.

    Args:
        streams: The sources and their weights; without any, all count the same.
        bucketing: How samples share batches.
        mixing: How many of each stream, and in which batches; a batch takes a pack's place.
        order: With shuffle, sources with an index (lists, map-style datasets) are shuffled by the
            seed; None: samples come as they are stored. Others come as they come.
        buffers: How much may be resident at once.
        world: This process among the others; None: as torch.distributed, if it is initialised, or
            torchrun's variables say.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: While iterating: as `PackedIterableDataset`.

    The oldest sample that waits opens every batch, and its nearest lengths fill it: no sample waits
    for more than `buffer_samples` batches, however long it is.

    Batches have the keys of a pack's, rows as long as their longest sample, and `seq_lens`, the
    tokens of each row, int64, shape (n,). `document_ids` are 1 where there are tokens, and
    `position` counts the batches of all ranks and workers as if they kept step. Iterate it with
    `PackedDataLoader`, torchdata's ``StatefulDataLoader`` or torch's ``DataLoader(dataset,
    batch_size=None)``; states are exact after any batch, in the same world. Ranks may take unequal
    numbers of steps, as with `PackedIterableDataset`.

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
    ) -> None:
        if not isinstance(bucketing, Bucketing):
            raise ConfigError(
                f"bucketing=<{type(bucketing).__name__}> is no Bucketing; pass bucketing="
                "streampack.Bucketing(max_tokens=8192)"
            )
        check_streams(streams, IterableStream)
        check_configs(mixing=mixing, order=order, buffers=buffers, world=world)
        check_options(type(self).__name__, mixing, order, buffers, epoch_ends=("pad",))
        check_fields(streams, bucketing.packing())
        if any("seq_lens" in {*stream.token_fields, *stream.payloads} for stream in streams):
            raise ConfigError(
                "a stream has an extra field 'seq_lens', which is a key of every batch already; "
                "give it another name in the source"
            )
        plan = flow_plan(
            streams,
            bucketing.packing(),
            mixing or Mixing(),
            order,
            batch_size=1,
            bucketing=bucketing,
        )
        super().__init__(plan, buffers, world)
