"""Send results from a worker to the training loop, with the memory of tensors as it is.

::

    worker   {tokens, labels, epoch ...}  --pickle-->    | pickle | tokens | labels | ...
                                                                | a socket
    main     {tokens, labels, epoch ...}  <--unpickle--  | pickle | tokens | labels | ...

Pickle's protocol 5 leaves large arrays out, and tensors are pickled as arrays. This is for batches
that only a worker can make. Planned batches need less, see shared_ring.py.

Cost: two copies of a batch, in and out of the socket.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from streampack.types import IntArray

SMALL_BYTES = 4096  # an array of less is part of the pickle
MOST_PARTS = 1000  # of a call; Linux takes 1,024


def pickled_parts(result: Any) -> list[memoryview]:
    """Return a result as a pickle and the memory of its large arrays."""
    out, parts = BytesIO(), list[memoryview]()

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= SMALL_BYTES:
            parts.append(memory)
        return memory.nbytes < SMALL_BYTES

    ForkingPickler(out, 5, True, is_inside).dump(result)
    return [out.getbuffer(), *parts]


def unpickled(parts: list[Any]) -> Any:
    """Return the result of received parts.

    >>> sent = pickled_parts({"tokens": np.arange(1000), "epoch": 3})
    >>> [part.nbytes > 1000 for part in sent]
    [False, True]
    >>> unpickled([np.array(part) for part in sent])["tokens"][-1]
    np.int64(999)
    """
    return pickle.loads(parts[0], buffers=parts[1:])


def by_value(tensor: Tensor) -> Any:
    """Reduce a tensor to an array of its bytes, so that no memory is shared."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.requires_grad or tensor.is_quantized:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _tensor_of, (flat.numpy(), tensor.dtype, tuple(tensor.shape))


def _tensor_of(flat: IntArray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).reshape(shape)


def send_parts(connection: Any, iteration: int, parts: list[memoryview]) -> None:
    """Send the parts of a result of an iteration."""
    connection.send((iteration, [part.nbytes for part in parts]))
    _move(os.writev, connection, parts)


def receive_parts(connection: Any) -> tuple[int, list[Any]]:
    """Wait for the parts of a result; return its iteration too.

    OSError: the socket broke, or time is over.
    """
    iteration, sizes = connection.recv()
    parts: list[Any] = [np.empty(size, np.uint8) for size in sizes]
    _move(os.readv, connection, [memoryview(part) for part in parts])
    return iteration, parts


def _move(move: Callable[[int, Any], int], connection: Any, parts: list[memoryview]) -> None:
    """Write all parts, or fill them, in few calls: each gives other threads the interpreter."""
    left = list(parts)
    while left:
        num_bytes = move(connection.fileno(), left[:MOST_PARTS])
        if not num_bytes:
            raise EOFError
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if num_bytes:
            left[0] = left[0][num_bytes:]
