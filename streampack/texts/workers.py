"""Worker processes that read and tokenize rows, each one task at a time, through a pipe.

::

    start_worker(work) --> Popen: python -c "from MODULE import work; work(descriptor, num_threads)"
    pipe.send(task) ------------------------------------------> pipe.recv()
    receive(pipe, process) <------------------------------------ pipe.send(outcome)

Not multiprocessing's processes: they import the caller's script, and a script that makes a dataset
of rows need not guard its lines by the name "__main__". Forks would copy threads.
"""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from streampack.errors import StreampackError, WorkerError, naming_limits

END_S = 5.0  # for a worker to end after SIGTERM


def start_worker(
    work: Callable[[int, int], None], num_threads: int
) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a process that calls `work(descriptor, num_threads)`; return its pipe."""
    ours, theirs = multiprocessing.Pipe()
    name = work.__name__
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {work.__module__} import {name}; "
        f"{name}({theirs.fileno()}, {num_threads})"
    )
    # The worker inherits the blocked signal from its first moment on: a terminal's Ctrl-C reaches
    # only this process, which then terminates it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with naming_limits():
            process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return ours, process


def receive(pipe: Connection, process: subprocess.Popen[bytes], way_out: str) -> Any:
    """Return what a worker sent; a WorkerError with this way out says that it ended."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError) as error:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        code = process.returncode
        raise WorkerError(
            f"a worker process ended with exit code {code}"
            f"{' (killed: perhaps memory ran out; try fewer workers)' if code == -9 else ''}; "
            f"{way_out}"
        ) from error


def portable(error: Exception, way_out: str) -> BaseException:
    """Return an error that another process can raise, with its type if it is one of ours."""
    if isinstance(error, (StreampackError, OSError)):
        error.__traceback__ = None
        return error
    text = "".join(traceback.format_exception(error))
    return WorkerError(f"a part failed; {way_out}, or report this:\n{text}")


def end_workers(workers: Mapping[Connection, subprocess.Popen[bytes]]) -> None:
    """End worker processes, whatever they do."""
    for pipe, process in workers.items():
        pipe.close()
        process.terminate()
    for process in workers.values():
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
