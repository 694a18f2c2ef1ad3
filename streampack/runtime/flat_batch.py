"""Send a batch from a worker to the training loop with all of its tensors in one block.

::

    worker   tokens, labels, input_pos, ...  --flatten-->  | tokens | labels | input_pos | ... |
                                                                     | a socket
    main     tokens, labels, input_pos, ...  <--unfold---  | tokens | labels | input_pos | ... |

For batches that only a worker can make. Planned batches need less, see shared_ring.py.

Cost: two copies of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

ALIGNMENT = 64  # bytes; more than any dtype needs


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int

    def look(self, block: Tensor) -> Tensor:
        return block[self.first : self.last].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """Nested containers of tensors, with all tensors in one block."""

    block: Tensor
    """Bytes of the tensors, uint8, one after another."""
    content: Any
    """Everything else, and the place of each tensor."""

    def unfold(self) -> Any:
        """Return the original structure."""
        return _mapped(
            self.content, lambda leaf: leaf.look(self.block) if type(leaf) is _Place else leaf
        )


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure of dicts, lists and tuples with the leaves mapped."""
    kind = type(value)
    if kind is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([_mapped(item, change) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[_mapped(item, change) for item in value])
    return change(value)


def by_value(tensor: Tensor) -> Any:
    """Reduce a tensor such that the pickle has its bytes, and no connection is needed."""
    if not is_plain(tensor):
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    flat = flatten(tensor)
    return _unflattened, (flat.block.numpy(), flat.content)


def _unflattened(block: Any, content: Any) -> Any:
    return FlatBatch(torch.as_tensor(block), content).unfold()


def is_plain(value: Any) -> bool:
    """Return whether a tensor is fully described by its elements, dtype and shape.

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


def flatten(value: Any) -> FlatBatch:
    """Return a batch, or any nested dicts, lists and tuples of tensors, as one block.

    >>> flat = flatten({"tokens": torch.tensor([[5, 6]]), "epoch": 3})
    >>> flat.block.shape, flat.unfold()
    (torch.Size([16]), {'tokens': tensor([[5, 6]]), 'epoch': 3})
    """
    tensors: list[tuple[Tensor, _Place]] = []
    end = 0

    def place(leaf: Any) -> Any:
        """Give a tensor the next aligned bytes of the block; leave any other leaf."""
        nonlocal end
        if not is_plain(leaf):
            return leaf
        first = -(-end // ALIGNMENT) * ALIGNMENT
        end = first + leaf.nbytes
        tensors.append((leaf, _Place(leaf.dtype, tuple(leaf.shape), first, end)))
        return tensors[-1][1]

    content = _mapped(value, place)
    block = torch.empty(end, dtype=torch.uint8)
    for tensor, span in tensors:
        span.look(block).copy_(tensor)
    return FlatBatch(block, content)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: next to busy workers, waking others costs more than it gains."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    try:  # an interrupt may arrive as soon as the number is set
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(num_threads)
