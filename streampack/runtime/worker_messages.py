"""The messages between a training loop and its worker processes.

::

    (n, True, start)     sets up the work of iteration n
    (n, False, task)     a task of iteration n
    (n, results)         a pickle without tensors, then the bytes of all tensors; None: n has begun

Cost: 50 us per message, two copies of the tensors.
"""

from __future__ import annotations

import copy
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch

from streampack.runtime.flat_batch import FlatBatch, flatten

# From a task to results; to an empty list if the worker has no more in this iteration.
Work: TypeAlias = Callable[[Any], list[Any]]
Serve: TypeAlias = Callable[[Any], Work]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed:
    """An error on its way to the training loop."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Wrap an error in a picklable form; one that cannot be rebuilt is sent as its text."""
        text = "".join(traceback.format_exception(error))
        try:
            pickle.dumps(copy.copy(error))
        except Exception:
            error = RuntimeError(text)
        error.add_note(f"in reading worker {os.getpid()}")
        if error.__traceback__ is not None:
            error.add_note(text)
        return cls(error=error)


def pickled(iteration: int, result: Any) -> tuple[Any, torch.Tensor]:
    """Return a result as a pickle and the block of its tensors."""
    flat = flatten(result)
    try:
        return ForkingPickler.dumps((iteration, flat.content, flat.block.nbytes)), flat.block
    except Exception as error:  # of a batch that cannot be pickled
        flat = flatten([Failed.of(error)])
        return ForkingPickler.dumps((iteration, flat.content, 0)), flat.block


def send_result(connection: Any, message: Any, block: torch.Tensor) -> None:
    """Send a pickled result, then its block."""
    connection.send_bytes(message)
    left = memoryview(block.numpy())  # type: ignore[arg-type]
    while len(left):
        left = left[os.write(connection.fileno(), left) :]


def receive_result(connection: Any) -> tuple[int, FlatBatch]:
    """Wait for a result; return its iteration too.

    Raises:
        EOFError: If the other end closed.
        OSError: If the socket is broken, or its time limit is over.
    """
    iteration, content, num_bytes = connection.recv()
    block = torch.empty(num_bytes, dtype=torch.uint8)
    left = memoryview(block.numpy())  # type: ignore[arg-type]
    while len(left):
        num_read = os.readv(connection.fileno(), [left])
        if not num_read:
            raise EOFError
        left = left[num_read:]
    return iteration, FlatBatch(block, content)
