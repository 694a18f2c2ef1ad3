"""A worker process: receives tasks, works, and sends results.

::

    socket --Inbox, a thread--> tasks --work--> results --Outbox, a thread--> socket

The threads let the training loop send to a busy worker, and the worker continue while the loop is
busy. Workers ignore signals that schedulers send to a whole process group: the training process
handles them. They end when the other end of their socket closes, as it does when that process dies.
"""

from __future__ import annotations

import copy
import os
import pickle
import queue
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from streampack.runtime.torch_worker import TorchWorker, introduce
from streampack.types import IntArray

SMALL_BYTES = 4096  # an array of less is part of the pickle
MOST_PARTS = 1000  # of a call; Linux takes 1,024
ORPHANED_S = 5.0  # time limit for the task of a worker that is no longer needed

# Sent to process groups. The training process may handle them, also from later on.
SENT = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}

# From a task to results; to an empty list if the worker has no more in this iteration.
DoTask: TypeAlias = Callable[[Any], list[Any]]
Serve: TypeAlias = Callable[[Any], DoTask]


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


def serve_reads(read: Callable[[Any], Any], _given: None) -> Callable[[Any], list[Any]]:
    """Return the work of a `Pool` that reads groups of tasks, each up to the first that fails."""

    def results_of(tasks: tuple[Any, ...]) -> list[Any]:
        results = []
        try:
            for task in tasks:
                results.append(read(task))
        except Exception as error:
            results.append(Failed.of(error))
        return results

    return results_of


class _Inbox:
    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.messages: queue.SimpleQueue[tuple[int, bool, Any] | None] = queue.SimpleQueue()
        self.latest = 0
        threading.Thread(target=self._listen, name="streampack-tasks", daemon=True).start()

    def _listen(self) -> None:
        # In a thread, so that a training process that sends never waits for a busy worker.
        with suppress(EOFError, OSError):
            while True:
                message = self._theirs.recv()
                self.latest = message[0]
                self.messages.put(message)
        self.latest = -1
        self.messages.put(None)
        time.sleep(ORPHANED_S)
        os._exit(1)


class _Outbox:
    """Messages from a worker, sent in a thread so that the worker need not wait for the reader."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._messages: queue.SimpleQueue[tuple[int, list[memoryview]]] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="streampack-results", daemon=True).start()

    def put(self, iteration: int, results: list[Any] | None) -> None:
        """Send results, or None: an iteration was set up."""
        try:
            parts = [] if results is None else pickled_parts(results)
        except Exception as error:  # of a batch that cannot be pickled
            parts = pickled_parts([Failed.of(error)])
        self._messages.put((iteration, parts))

    def _send(self) -> None:
        with suppress(OSError):  # the reader is gone
            while True:
                iteration, parts = self._messages.get()
                self._theirs.send((iteration, [part.nbytes for part in parts]))
                _move(os.writev, self._theirs, parts)
                del parts


def run_worker(
    theirs: Any,
    serve: Serve,
    worker: TorchWorker,
    mask: set[Any],
    environment: dict[str, str] | None,
) -> None:
    """Run a worker with this signal mask until the other end of its socket closes.

    `environment` replaces the process's own; None if it has the training process's already.
    """
    _leave_signals()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # until here, a fork blocks all of them
    _seed(worker.base_seed + worker.number)
    introduce(worker, serve)
    ForkingPickler.register(torch.Tensor, by_value)
    inbox, outbox = _Inbox(theirs), _Outbox(theirs)
    work: DoTask | None = None
    while (message := inbox.messages.get()) is not None:
        iteration, is_begin, task = message
        if is_begin:
            work = None  # do not keep it while the next is made
            work = _begun(serve, task)
            outbox.put(iteration, None)
        elif work is not None and iteration == inbox.latest:
            outbox.put(iteration, _results(work, task))


def _leave_signals() -> None:
    """Drop inherited handlers: a trainer's would save a checkpoint here, of a wrong position."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in signal.valid_signals():
        if number in SENT or callable(signal.getsignal(number)):
            # A function, because programs that a source starts would inherit SIG_IGN.
            signal.signal(number, signal.SIG_DFL if number in FAULTS else lambda *_: None)
    signal.set_wakeup_fd(-1)  # of the trainer's event loop


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def _begun(serve: Serve, given: Any) -> DoTask:
    try:
        return serve(given)
    except Exception as error:
        failed = Failed.of(error)
        return lambda _: [failed]


def _results(work: DoTask, task: Any) -> list[Any]:
    try:
        return work(task)
    except Exception as error:
        return [Failed.of(error)]


# Messages: a pickle of protocol 5, then the memory of large arrays and tensors, as it is.


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
