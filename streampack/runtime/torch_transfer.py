"""Transfer of batches through torch's own loaders: as tokens and a recipe for the other tensors.

::

    worker   dataset --> CompactPickleBatch: a dict of tensors, and the rows they were made of
                           |  the user's code may do anything with it
             torch       pickles it: 4 (or 2) bytes per token, and any modified values
                           |  a pipe
    main     torch       unpickles a plain dict, with all tensors made again

torch sends each tensor of a dict separately, with its own shared memory and connection: about 0.3
ms on each side. torch has no hook for a dict that leaves the worker. So this module hooks into the
pickler between processes (`ForkingPickler`). Any other pickle, deep copy or `torch.save` gives a
plain dict.

Writes to a tensor, for instance through numpy, cannot be detected either. So the batch is made once
more before it is sent, and values that differ are sent as they are.

Batches without rows, in a custom format or from `PackedIterableDataset`, use the pipe too if they
are small (see flat_batch.py). Large ones use torch's path, because more copies cost more than more
connections. Batches that are not dicts, such as torchtitan's pairs, always use torch's path.

torch's `DataLoader` does not tell a dataset its batch_size. With any value but None, which is not
the default, it would stack whole batches. But its collate function dispatches on type.

Cost: for 64 K native tokens 0.3 ms in the worker and 0.1 ms in the main process, plus about 0.3 ms
for pipe and queues. Memory: the rows, while a batch waits in the worker; and a few batches that
wait for reuse, for the lifetime of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from streampack.batch.batch import Batch, Step, make_batches
from streampack.batch.buffer_pool import BufferPool
from streampack.batch.formats.registry import Formatter, to_native
from streampack.errors import ConfigError
from streampack.gather.gather import Rows
from streampack.plan import DevicePlan
from streampack.runtime.batch_reader import BatchReader
from streampack.runtime.flat_batch import (
    LARGEST_IN_PIPE,
    FlatBatch,
    flatten,
    is_plain,
    one_thread,
    sendable,
)
from streampack.types import IntArray, Packs

# No object here belongs to a loader, so there is one pool per process. New memory would take longer
# than the rest.
_BLOCKS = BufferPool()

NO_TOKENS = np.zeros((0, 0), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchInputs:
    """Everything that a batch is made of."""

    rows: Rows
    """Its tokens, which are not written to any more."""
    packs: Packs
    """The plan of these rows."""
    step: Step
    positions: str
    """"restart" or "continue"."""
    convert: Formatter
    """Format of the batch; one that `is_cheap`."""

    def make(self) -> Any:
        """Make the batch."""
        steps = [self.step]
        [native] = make_batches(
            self.rows, self.packs, steps=steps, positions=self.positions, blocks=_BLOCKS
        )
        if self.convert is to_native:
            return native
        with one_thread():
            return self.convert(native)


class CompactPickleBatch(dict[str, Any]):
    """A batch of a dataset, which other processes receive as a plain dict.

    `inputs` is what it was made of, if known.

    >>> import copy, pickle
    >>> batch = CompactPickleBatch({"epoch": 3})
    >>> batch, type(copy.copy(batch)).__name__, type(pickle.loads(pickle.dumps(batch))).__name__
    ({'epoch': 3}, 'CompactPickleBatch', 'dict')
    """

    __slots__ = ("inputs",)

    def __init__(self, batch: Any = (), inputs: BatchInputs | None = None) -> None:
        super().__init__(batch)
        self.inputs = inputs

    def __copy__(self) -> CompactPickleBatch:
        # torch's default_convert fills a copy, and the worker sends that copy.
        return CompactPickleBatch(self, self.inputs)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def transferable(batch: Any, inputs: BatchInputs | None = None) -> Any:
    """Wrap a batch so that it is not stacked and is sent in one piece, if it is a dict."""
    if type(batch) is not dict:
        return batch
    _register()
    return CompactPickleBatch(batch, inputs)


@cache
def _register() -> None:
    """Register the class with ForkingPickler, default_collate and pytree."""
    ForkingPickler.register(CompactPickleBatch, _send)
    default_collate_fn_map[CompactPickleBatch] = _refuse_to_stack
    pytree.register_pytree_node(
        CompactPickleBatch,
        lambda batch: (list(batch.values()), list(batch)),
        lambda values, names: dict(zip(names, values, strict=True)),
    )


def _refuse_to_stack(
    batches: list[CompactPickleBatch],
    *,
    collate_fn_map: object = None,  # noqa: ARG001 - torch passes it
) -> CompactPickleBatch:
    raise ConfigError(
        f"torch's DataLoader has batch_size={len(batches)} and would stack whole batches; set "
        "DataLoader(dataset, batch_size=None), and how many packs a batch holds in the dataset"
    )


def read_transferable(read: BatchReader, plan: DevicePlan) -> Any:
    """Read the batch of a plan in a worker of torch's own loader."""
    if not read.is_cheap or read.keeps_rows:
        return transferable(read(plan))
    # This memory is not reused while any array refers to it.
    array, tokens = read.room(plan)
    rows = read.gatherer.gather(plan.packs, plan.num_rows, out=array)
    inputs = BatchInputs(
        rows=rows,
        packs=plan.packs,
        step=(plan.epoch, plan.position),
        positions=read.packing.positions,
        convert=read.convert,
    )
    [batch] = read.finish(plan, rows, tokens)
    return transferable(batch, inputs)


Sent = tuple[list[str], Batch | FlatBatch, BatchInputs | None, Any, Any]


def _send(batch: CompactPickleBatch) -> tuple[Callable[..., Batch], Sent]:
    """Return the function and arguments that make the batch in another process."""
    inputs = batch.inputs
    again = {} if inputs is None else inputs.make()
    rest = {
        name: value
        for name, value in batch.items()
        if name not in again or not _is_same(value, again[name])
    }
    num_bytes = sum(value.nbytes for value in rest.values() if is_plain(value))
    values = flatten(rest) if num_bytes <= LARGEST_IN_PIPE else rest
    names = list(batch)
    if inputs is None or len(rest) == len(batch):
        return _receive, (names, values, None, None, None)
    rows = inputs.rows
    bare = replace(inputs, rows=replace(rows, tokens=NO_TOKENS, labels=None))
    labels = None if rows.labels is None else sendable(torch.from_numpy(rows.labels))
    return _receive, (names, values, bare, sendable(torch.from_numpy(rows.tokens)), labels)


def _receive(
    names: list[str], values: Batch | FlatBatch, bare: BatchInputs | None, tokens: Any, labels: Any
) -> Batch:
    """Make the batch; `tokens` and `labels` belong to the inputs."""
    batch = {}
    if bare is not None:
        labels = None if labels is None else np.asarray(labels)
        rows = replace(bare.rows, tokens=np.asarray(tokens), labels=labels)
        batch = replace(bare, rows=rows).make()
    batch |= values.unfold() if isinstance(values, FlatBatch) else values
    return {name: batch[name] for name in names}


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are indistinguishable; False if unknown."""
    if not is_plain(one) or not is_plain(other):
        return type(one) is type(other) and isinstance(one, int | str) and one == other
    return one.dtype == other.dtype and np.array_equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> IntArray:
    """Return integers of the same bits: -0.0 is not 0.0."""
    array: IntArray = tensor.numpy()
    return array.view(f"i{array.itemsize}")
