"""Engines: where the parts of a job are written.

::

    tasks --> this process            one part after another
          --> worker processes        one part each at a time, dealt in order
          --> Ray                     a Ray task for each part, on any machine of a cluster
                 '--> Event: counts so far, or the result of a part
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from streampack._extras import import_extra
from streampack.errors import ConfigError, WorkerError
from streampack.texts.pool import WAY_OUT, end_workers, outcomes, receive, start_worker
from streampack.write.options import WriteOptions
from streampack.write.part import Event, PartTask, write_part

SMALL_BYTES = 4 << 20  # written sooner than a second process could start


def write_parts(tasks: Sequence[PartTask], options: WriteOptions) -> Generator[Event]:
    """Write parts with the engine of the options, which ends with the iteration."""
    is_small = sum(task.part.num_bytes for task in tasks) < SMALL_BYTES
    num_workers = options.num_workers or (1 if is_small else os.cpu_count() or 1)
    num_workers = min(num_workers, len(tasks))
    if options.engine == "ray" and tasks:
        return _run_on_ray(tasks, options.num_workers)
    if num_workers > 1:
        return _run_in_processes(tasks, num_workers)
    return (event for task in tasks for event in write_part(task))


def _run_in_processes(tasks: Sequence[PartTask], num_workers: int) -> Generator[Event]:
    pending = deque(tasks)
    workers: dict[Connection, subprocess.Popen[bytes]] = {}
    # The cores that are left when there are fewer parts than cores.
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    try:
        while pending and len(workers) < num_workers:
            # However long the caller takes with an event, they wait for the next part.
            pipe, process = start_worker(num_threads, None)
            workers[pipe] = process
            pipe.send(partial(write_part, pending.popleft()))
        while workers:
            for pipe in workers.keys() & wait(list(workers)):
                event = _event(receive(pipe, workers[pipe]))
                yield event
                if event[-1] is None:
                    continue
                if pending:
                    pipe.send(partial(write_part, pending.popleft()))
                else:
                    end_workers({pipe: workers.pop(pipe)})
    finally:
        end_workers(workers)


def _run_on_ray(tasks: Sequence[PartTask], num_workers: int | None) -> Generator[Event]:
    ray = import_extra("ray", "ray", "engine='ray'", "set engine='processes'")
    is_own = not ray.is_initialized()
    if is_own:
        _connect(ray)
    try:
        remote = ray.remote(num_cpus=1, max_retries=3)(_write_quietly)
        pending = deque(tasks)
        running: list[Any] = []
        limit = num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        while pending or running:
            while pending and len(running) < limit:
                running.append(remote.remote(pending.popleft()))
            done, running = ray.wait(running, num_returns=1)
            try:
                outcome = ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise WorkerError(f"Ray gave up on a part ({error}); {WAY_OUT}") from error
            yield _event(outcome)
    finally:
        if is_own:
            ray.shutdown()


def _connect(ray: Any) -> None:
    try:
        ray.init(log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        address = os.environ.get("RAY_ADDRESS", "auto")
        raise ConfigError(
            f"RAY_ADDRESS={address!r}: {error}; start the cluster, set RAY_AUTH_MODE=token if it "
            "asks for a token, as clusters of Ray 2.60 do by default, or set engine='processes'"
        ) from error


def _write_quietly(task: PartTask) -> Event | BaseException:
    """Write a part in a Ray task, which carries only the last event."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    last: Event | BaseException
    *_, last = outcomes(partial(write_part, task))
    return last


def _event(outcome: Event | BaseException) -> Event:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
