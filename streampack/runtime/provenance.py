"""Where the tokens of a batch come from: its segments, a stream for each token, its step.

::

    stream ids + 1 as tokens --make_batches--> native --the batch's format--> their layout there

So each format lays out the streams as it lays out tokens, also where it drops or adds padding.

Cost: 2 us for a batch that is delivered. The rest is made when it is asked for; stream ids cost a
native batch and its format.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import numpy as np
import torch

from streampack.batch.batch import make_batches
from streampack.batch.compact import to_compact
from streampack.batch.formats.registry import Formatter, is_cheap, to_native, unwrapped
from streampack.batch.slices import slice_batch
from streampack.config import Packing
from streampack.errors import ConfigError
from streampack.gather.context_slice import ContextSlice
from streampack.gather.gather import Rows
from streampack.types import IGNORED, LENGTH, STREAM, Int64Array, Packs

RECENT = 64
"""Delivered batches of which a loader knows the provenance."""
TOKENS = ("tokens", "input_ids", "input")
"""What formats call the tokens."""


def _unknown_step() -> int:
    raise ConfigError(
        "the step of this batch of iterables is not known, as their epochs have no known length; "
        "set steps to a number, such as steps=1000, or count the optimizer's steps"
    )


@dataclass(kw_only=True, eq=False)
class Provenance:
    """The origin of a delivered batch, from `PackedDataLoader.provenance`."""

    epoch: int
    """The batch's epoch, or its chapter."""
    stream_names: Sequence[str]
    """The names of the streams, by stream id."""
    packs_of: Callable[[], Packs]
    shape: tuple[int, int]
    """Rows and token slots of the native batch, before it is divided among ranks."""
    packing: Packing
    context: ContextSlice | None
    """This rank's share of the rows, or None for whole rows."""
    convert: Formatter
    """The function of the batch's format."""
    position: int
    step_of: Callable[[], int] = _unknown_step

    @property
    def step(self) -> int:
        """The step of the run: the number of its global batch, over all epochs or chapters, from 0.

        Micro-batches of one optimizer step have the same. After epochs with epoch_end="pad" or
        "drop", these are planned once to count their steps.

        Raises:
            ConfigError: If the batch is of a dataset of iterables without a number of `steps`.
        """
        return self.step_of()

    @cached_property
    def packs(self) -> Packs:
        """The packs of the batch; padding rows come after them."""
        return self.packs_of()

    @cached_property
    def segments(self) -> Int64Array:
        """Row, stream, pass, sample, start and length of each segment; int64, shape (n, 6).

        Rows are those of the native batch. `PackedStreamingDataset.document` takes a segment.
        """
        rows = np.repeat(np.arange(len(self.packs.ends)), np.diff(self.packs.ends, prepend=0))
        return np.column_stack([rows, self.packs.segments[:, : LENGTH + 1]])

    @cached_property
    def stream_ids(self) -> Int64Array:
        """The stream of each token, -1 for padding; int64, of the shape of the batch's tokens.

        For a `batch_format` that is a function of yours, the shape is that of the native batch.
        """
        tokens = np.zeros(self.shape, np.int32)
        segments, ends = self.packs.segments, self.packs.ends
        streams, lengths = segments[:, STREAM], segments[:, LENGTH]
        multiple = self.packing.pad_to_multiple or 1
        edges = np.concatenate([[0], np.cumsum(-(-lengths // multiple) * multiple)])
        first_of_row = edges[np.concatenate([[0], ends[:-1]])] if len(ends) else edges
        row = self.segments[:, 0]
        begins = row * self.shape[1] + edges[:-1] - first_of_row[row]
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens.reshape(-1)[np.repeat(begins, lengths) + offsets] = np.repeat(streams + 1, lengths)
        no_targets = np.full(len(segments), IGNORED, np.int64)
        rows = Rows(tokens=tokens, next_tokens=no_targets, labels=None, multiple=multiple)
        [batch] = make_batches(rows, self.packs, steps=[(0, 0)], positions=self.packing.positions)
        if self.context is not None:
            batch = slice_batch(batch, self.context)
        bare, _ = unwrapped(self.convert)
        convert = self.convert if is_cheap(bare) and bare is not to_compact else to_native
        made = convert(batch)
        made = made if isinstance(made, Mapping) else made[0]
        ids: Int64Array = next(made[name] for name in TOKENS if name in made).numpy() - 1
        return ids


Origin: TypeAlias = Provenance | Callable[[], Provenance]


class RecentBatches:
    """The provenance of the batches that a loader delivered last."""

    def __init__(self, size: int = RECENT) -> None:
        # With the first tensor of each batch, if it has one.
        self._known: deque[tuple[ref[torch.Tensor] | None, Origin]] = deque(maxlen=size)

    def add(self, batch: Any, origin: Origin) -> None:
        """Record a batch, with its provenance or what makes it; its memory is freed as before."""
        tensor = next(tensors_in(batch), None)
        self._known.append((None if tensor is None else ref(tensor), origin))

    def last(self) -> Provenance:
        """Return the provenance of the last batch."""
        return _made(self._known[-1][1])

    def find(self, batch: Any) -> Provenance:
        """Return the provenance of a batch, by its tensors, or by its epoch and position.

        Raises:
            ConfigError: If it is not one of the last batches, or has neither.
        """
        tensor = next(tensors_in(batch), None)
        for known, origin in reversed(self._known):
            if tensor is not None and known is not None and known() is tensor:
                return _made(origin)
        if isinstance(batch, Mapping) and {"epoch", "position"} <= set(batch):
            place = int(batch["epoch"]), int(batch["position"])
            for _, origin in reversed(self._known):
                provenance = _made(origin)
                if (provenance.epoch, provenance.position) == place:
                    return provenance
        raise ConfigError(
            f"the batch, a {type(batch).__name__}, is not one of the last {len(self._known)} that "
            "this loader delivered; pass a batch as it was delivered, before its tensors are "
            f"copied or moved, and before the loader delivers {RECENT} more"
        )


def _made(origin: Origin) -> Provenance:
    return origin if isinstance(origin, Provenance) else origin()


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch of any format."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping | tuple | list):
        for each in thing.values() if isinstance(thing, Mapping) else thing:
            yield from tensors_in(each)


class StreamSums(NamedTuple):
    """What `by_stream` returns, as arrays or tensors of shape (num_streams,)."""

    sums: Any
    """The sum of the losses of each stream's tokens, float64."""
    counts: Any
    """How many tokens these are, int64."""


def by_stream(provenance: Provenance, loss_per_token: Any, labels: Any = None) -> StreamSums:
    """Return the sums and counts of a batch's losses by stream.

    Args:
        provenance: The batch's, from ``loader.provenance(batch)``.
        loss_per_token: A tensor or an array of the shape of the batch's tokens, such as
            ``cross_entropy(..., reduction="none")`` returns. Tensors stay on their device, and
            nothing waits for the device.
        labels: The targets of these losses, of the same shape. Tokens with the label -100 are not
            counted. None: all tokens but padding count.

    Raises:
        ConfigError: If a shape is not that of the batch's tokens.

    >>> packs = Packs(segments=np.array([[1, 0, 7, 0, 2, 2]]), ends=np.array([1]))
    >>> origin = Provenance(epoch=0, position=1, stream_names=["web", "code"],
    ...     packs_of=lambda: packs, shape=(1, 3), packing=Packing(max_seq_len=3), context=None,
    ...     convert=to_native, step_of=lambda: 0)
    >>> by_stream(origin, np.array([[0.5, 2.0, 9.0]]), labels=np.array([[8, 3, -100]]))
    StreamSums(sums=array([0. , 2.5]), counts=array([0, 2]))
    """
    ids, num_streams = provenance.stream_ids, len(provenance.stream_names)
    for name, values in (("loss_per_token", loss_per_token), ("labels", labels)):
        if values is not None and tuple(values.shape) != ids.shape:
            raise ConfigError(
                f"{name} has the shape {tuple(values.shape)}, but the batch's tokens have "
                f"{ids.shape}; pass a value for each token, in the same places"
            )
    losses = torch.as_tensor(loss_per_token).detach()
    places = torch.from_numpy(ids).to(losses.device, non_blocking=True)
    is_left_out = places < 0
    if labels is not None:
        is_left_out |= torch.as_tensor(labels, device=losses.device) == IGNORED
    places = places.masked_fill(is_left_out, num_streams).flatten()
    sums = losses.new_zeros(num_streams + 1, dtype=torch.float64)
    sums.index_add_(0, places, losses.flatten().double())
    counts = torch.zeros_like(sums, dtype=torch.int64)
    counts.index_add_(0, places, torch.ones_like(places))
    found = sums[:num_streams], counts[:num_streams]
    is_tensor = torch.is_tensor(loss_per_token)
    return StreamSums(*(found if is_tensor else [each.numpy() for each in found]))
