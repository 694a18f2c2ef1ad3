"""A batch's way from a worker to the training loop, in one piece of shared memory.

::

    worker   tokens, labels, input_pos, ...  --fold-->  | tokens | labels | input_pos | ... |
                                                                     | one file descriptor
    here     tokens, labels, input_pos, ...  <-unfold-  | tokens | labels | input_pos | ... |

torch hands every tensor over by itself: a piece of shared memory and a connection for each, some
0.3 ms on either side, whatever its size. The tensors that come out share one block, which lives as
long as any of them.

For batches that only a worker can make: those of the planned way need less, see ring.py.

Cost: about 1 ms a batch on either side, half of what it is tensor by tensor; two copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streampack.assemble import Batch
from streampack.load.reader import BatchReader
from streampack.plan import DevicePlan

__all__ = [
    "LARGEST_IN_PIPE",
    "Folded",
    "FoldingReader",
    "fold",
    "is_plain",
    "one_thread",
    "sendable",
]

ALIGNMENT = 64  # bytes; more than any dtype needs

# What is larger goes through shared memory: a pipe holds 64 KiB at once, and takes more copies.
LARGEST_IN_PIPE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """A batch whose tensors lie in one block."""

    block: Tensor
    """Their bytes, uint8, one after the other."""
    places: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    """Of each tensor: dtype, shape, its first byte and one past its last."""
    others: dict[str, Any]
    """What is no tensor."""

    def unfold(self) -> Batch:
        """Return the batch."""
        tensors = {
            name: self.block[first:last].view(dtype).reshape(shape)
            for name, (dtype, shape, first, last) in self.places.items()
        }
        return tensors | self.others

    def __reduce__(self) -> tuple[Callable[..., Folded], tuple[Any, ...]]:
        return _folded, (sendable(self.block), self.places, self.others)

    def pin_memory(self) -> Folded:
        """Return the same in pinned memory; torch's loader calls it."""
        return Folded(self.block.pin_memory(), self.places, self.others)


def _folded(block: Any, places: dict[str, Any], others: dict[str, Any]) -> Folded:
    return Folded(torch.as_tensor(block), places, others)


def sendable(tensor: Tensor) -> Any:
    """Return a tensor, or what is sent faster than one; `torch.as_tensor` takes it back."""
    return tensor.numpy() if tensor.nbytes <= LARGEST_IN_PIPE else tensor


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor that its elements, dtype and shape tell all about.

    >>> is_plain(torch.zeros(2)), is_plain(torch.zeros(2, requires_grad=True)), is_plain(None)
    (True, False, False)
    """
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_quantized
    )


def fold(batch: Batch) -> Folded:
    """Return a batch in one block.

    >>> folded = fold({"tokens": torch.tensor([[5, 6]]), "epoch": 3})
    >>> folded.block.shape, folded.unfold()
    (torch.Size([16]), {'tokens': tensor([[5, 6]]), 'epoch': 3})
    """
    tensors = {name: value for name, value in batch.items() if is_plain(value)}
    places: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    end = 0
    for name, tensor in tensors.items():
        first = -(-end // ALIGNMENT) * ALIGNMENT
        end = first + tensor.nbytes
        places[name] = (tensor.dtype, tuple(tensor.shape), first, end)
    block = torch.empty(end, dtype=torch.uint8)
    for name, tensor in tensors.items():
        dtype, shape, first, last = places[name]
        block[first:last].view(dtype).reshape(shape).copy_(tensor)
    others = {name: value for name, value in batch.items() if name not in tensors}
    return Folded(block, places, others)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch wake no other threads: beside busy workers they cost more than all else."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldingReader:
    """Makes whole batches in workers: in a format of one's own, or with masks."""

    reader: BatchReader

    def tasks(self, plans: Iterable[DevicePlan]) -> Iterable[DevicePlan]:
        """Return the plans."""
        return plans

    def __call__(self, plan: DevicePlan) -> Any:
        """Read a batch; in a worker."""
        batch = self.reader(plan)
        return fold(batch) if isinstance(batch, dict) else batch

    def finish(self, _plan: DevicePlan, got: Any) -> Any:
        """Return the batch; in the training process."""
        return got.unfold() if isinstance(got, Folded) else got
