"""Memory for batches, reused once no tensor refers to it.

::

    take --> | tokens | labels | input_pos | document_ids |    one block, several tensors
               the loop, autograd, a user's list ...
    take --> the same block, if the last of its tensors is gone; else another one

New memory costs a page fault every 4 KiB at first touch, more than the rest of making a batch. So a
block returns to the pool when the last tensor, view or array on it is freed, wherever that happens.
Pinned blocks come from torch's own allocator, which also waits for pending copies to a GPU.

Cost: about 10 us per block. Memory: `KEPT` idle blocks, and those in use.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from streampack.types import IntArray

KEPT = 4  # idle blocks
KEPT_LAYOUTS = 64  # batches of buckets, and their segments, come in many sizes
CACHE_LINE = 64  # bytes; a cache line, and more than any dtype needs

Array: TypeAlias = tuple[type[np.integer[Any]], tuple[int, ...]]


class _Returned(weakref.ref["_Owner"]):
    """A block on its way back to the pool: the callback of the reference to its owner."""

    __slots__ = ("block",)
    block: IntArray


class _Owner:
    """What arrays on a block refer to; with the last of them it returns the block to its pool.

    Not in a `__del__`, in which Python would swallow the exception of a signal handler: the
    callback of a weak reference is a C function, in which no handler runs.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_returned")

    def __init__(self, block: IntArray, waiting: deque[IntArray | _Returned]) -> None:
        # numpy reads this attribute; the array that it makes keeps a reference to this object.
        self.__array_interface__ = block.__array_interface__
        returned = _Returned(self, waiting.append)
        returned.block = block if block.base is None else block.base
        self._returned = returned  # last: an interrupt comes before, or the block returns


class Scratch:
    """Temporary arrays that are reused after `give_back`; per process, thread-safe.

    >>> scratch = Scratch()
    >>> first = scratch.take(np.int32, (2, 3))
    >>> scratch.give_back(first)
    >>> again, other = scratch.take(np.int32, (1, 3)), scratch.take(np.int32, (1, 3))
    >>> again.shape, np.shares_memory(first, again), np.shares_memory(first, other)
    ((1, 3), True, False)
    """

    def __init__(self) -> None:
        # A full deque drops its oldest item; append and pop are thread-safe without a lock.
        self.waiting: deque[IntArray | _Returned] = deque(maxlen=KEPT)

    def __getstate__(self) -> dict[str, Any]:
        return {"waiting": deque(maxlen=KEPT)}

    def take(self, dtype: type[np.integer[Any]], shape: tuple[int, ...]) -> IntArray:
        """Return an uninitialised array of this type and shape, possibly part of a larger one."""
        while True:
            try:
                found = self.waiting.pop()
            except IndexError:
                return np.empty(shape, dtype)
            array = found.block if isinstance(found, _Returned) else found
            # Drop smaller arrays: they belong to the first, smaller groups of batches.
            is_like = array.shape[1:] == shape[1:] and array.dtype == dtype
            if is_like and len(array) >= shape[0]:
                return array[: shape[0]]

    def give_back(self, array: IntArray) -> None:
        """Return an array to the pool; do not use it afterwards."""
        self.waiting.append(array if array.base is None else array.base)


class BufferPool:
    """Allocates arrays in reused memory, `pinned` for copies to a GPU; per process, thread-safe.

    >>> blocks = BufferPool()
    >>> [array], [[tokens]] = blocks.take((np.int64, (2, 3)))
    >>> array[:] = 5
    >>> first = tokens[0]
    >>> del array, tokens
    >>> _, [[others]] = blocks.take((np.int64, (2, 3)))  # not the same memory: `first` sees that
    >>> _ = others.fill_(6)
    >>> first.tolist()
    [5, 5, 5]
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._scratch = Scratch()

    def take(self, *shapes: Array, num_parts: int = 1) -> tuple[list[IntArray], list[list[Tensor]]]:
        """Return uninitialised arrays of these types and shapes, and tensors of their parts.

        Each array is cut into `num_parts` along its first dimension. There is a list for each part,
        with a tensor of every array.
        """
        begins, num_bytes = _lay_out(shapes)
        arrays: list[IntArray]
        if self._pinned:
            whole = _pinned(shapes, begins, num_bytes)
            arrays = [tensor.numpy() for tensor in whole]
            pieces = [tensor.chunk(num_parts) for tensor in whole]
        else:
            memory = self._scratch.take(np.uint8, (num_bytes,))
            block = np.asarray(_Owner(memory, self._scratch.waiting))
            arrays = [
                np.ndarray(shape, dtype, block, begin)
                for (dtype, shape), begin in zip(shapes, begins, strict=True)
            ]
            if num_parts == 1:
                return arrays, [list(map(torch.from_numpy, arrays))]
            pieces = [tuple(split_rows(array, num_parts)) for array in arrays]
        return arrays, [list(part) for part in zip(*pieces, strict=True)]


def split_rows(array: IntArray, num_parts: int) -> list[Tensor]:
    """Return tensors of an array's parts, each with the same number of rows.

    >>> [part.tolist() for part in split_rows(np.array([5, 6, 7, 8]), 2)]
    [[5, 6], [7, 8]]
    """
    size = len(array) // num_parts
    return [torch.from_numpy(array[part * size : (part + 1) * size]) for part in range(num_parts)]


def _pinned(shapes: tuple[Array, ...], begins: list[int], num_bytes: int) -> list[Tensor]:
    """Return pinned tensors as views of torch's own block, so that torch can track copies of it."""
    block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return [
        block[begin : begin + _num_bytes(dtype, shape)]
        .view(torch.from_numpy(np.empty(0, dtype)).dtype)
        .view(shape)
        for (dtype, shape), begin in zip(shapes, begins, strict=True)
    ]


def _num_bytes(dtype: type[np.integer[Any]], shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


@lru_cache(KEPT_LAYOUTS)
def _lay_out(shapes: tuple[Array, ...]) -> tuple[list[int], int]:
    begins, end = [], 0
    for dtype, shape in shapes:
        begins.append(-(-end // CACHE_LINE) * CACHE_LINE)
        end = begins[-1] + _num_bytes(dtype, shape)
    return begins, end
