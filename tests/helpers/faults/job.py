"""A small training job that tests kill: it iterates a loader and logs each batch.

::

    test --fork this--> server (everything imported) --> minder --> job --> workers of the loader
                                                           |         |
    test <------------------ exit STATUS ------------------'         |
    test <------------------ pid N, then one message a batch --------'

    log.jsonl    {"began": [epoch, position]}                          at each start
                 {"epoch", "position", "digest", "segments", "altered", "state"}   a batch
                 {"outcome": "ok" | class of the error, "message", ...}            at the end

Each batch's line is a single write, made before the test is notified of the batch. It survives the
job, except that a kill can cut the last line off at a page boundary. The next start removes such a
fragment, reads the last state and resumes from it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3.session
import torch
from torch.utils.data import DataLoader

from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import StreampackError
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream
from streampack.world import World
from tests.helpers.batches import digest
from tests.helpers.builders import tokens_of, write_stream_files
from tests.helpers.locations import with_download

LOG = "log.jsonl"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a job's log, without a last one that was cut off."""
    path = folder / LOG
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _remove_cut_line(path: Path) -> None:
    """Remove a last line that was cut off by a kill; the test was never notified of its batch."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def num_altered(batch: dict[str, Any]) -> int:
    tokens = batch["tokens"].numpy()
    filled = [0] * len(tokens)
    wrong = 0
    for row, stream, _, sample, start, length in batch["segments"].tolist():
        here = tokens[row, filled[row] : filled[row] + length]
        wrong += int((here != tokens_of(stream, sample, start + length)[start:]).sum())
        filled[row] += length
    return wrong


def make_dataset(config: dict[str, Any]) -> PackedStreamingDataset:
    """Make the dataset that a config asks for; see `tests.helpers.faults.launch.Bench.config`."""
    return PackedStreamingDataset(
        streams=[Stream(**with_download(stream)) for stream in config["streams"]],
        packing=Packing(**config["packing"]),
        mixing=Mixing(**config["mixing"]),
        order=Order(**config["order"]),
        buffers=Buffers(**config["buffers"]),
        batch_size=config["batch_size"],
        world=World(**config["world"]),
    )


class _Job:
    def __init__(self, config: dict[str, Any], events: socket.socket) -> None:
        self._config = config
        self._events = events
        self._folder = Path(config["folder"])
        self._num_batches = 0
        _remove_cut_line(self._folder / LOG)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._log = os.open(self._folder / LOG, flags, 0o600)

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._log, json.dumps(line).encode() + b"\n")

    def last_state(self) -> dict[str, Any] | None:
        states = [line["state"] for line in read_log(self._folder) if "state" in line]
        return states[-1] if states else None

    def iterate(self) -> None:
        dataset = make_dataset(self._config)
        loader: Any
        if self._config["torch_loader"]:
            loader, owner = DataLoader(dataset, batch_size=None, **self._config["loader"]), dataset
        else:
            loader = owner = PackedDataLoader(dataset, **self._config["loader"])
        state = self._config["state"]
        if state == "last":
            state = self.last_state()
        if state is not None:
            owner.load_state_dict(state)
        self.write({"began": [state["epoch"], state["position"]] if state else [0, 0]})
        for _ in range(self._config["num_epochs"]):
            for batch in loader:
                own = owner is loader
                self._deliver(batch, owner.state_dict() if own else dataset.state_after(batch))
        stats = loader.stats() if owner is loader else None
        self.write({"outcome": "ok", "stats": stats})

    def _deliver(self, batch: dict[str, Any], state: dict[str, Any]) -> None:
        self.write(
            {
                "epoch": batch["epoch"],
                "position": batch["position"],
                "digest": digest(batch),
                "segments": batch["segments"][:, 1:].tolist(),
                "altered": num_altered(batch),
                "state": state,
            }
        )
        self._events.send(b"batch")
        self._num_batches += 1
        if self._config["in_step"] or self._num_batches == self._config["pause_at"]:
            self._events.recv(10)  # until the test lets it continue

    def run(self) -> int:
        try:
            self.iterate()
        except StreampackError as error:
            known = ("uri", "shard", "attempts", "elapsed_s")
            self.write(
                {
                    "outcome": type(error).__name__,
                    "message": str(error),
                    "at_s": time.monotonic(),
                    **{name: getattr(error, name, None) for name in known},
                }
            )
            traceback.print_exc()
            return 3
        except BaseException as error:
            self.write({"outcome": type(error).__name__, "message": str(error)})
            traceback.print_exc()
            return 4
        return 0


def run(config: dict[str, Any], events: socket.socket) -> int:
    os.environ.update(config["environment"])
    tempfile.tempdir = None  # the environment may name another
    torch.set_num_threads(1)
    return _Job(config, events).run()


def _mind(config: dict[str, Any], events: socket.socket) -> None:
    """Start a job, wait for it, and report its exit status."""
    errors = os.open(Path(config["folder"], "stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(errors, stream)
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that the job and its workers can be killed as a group
        # A shell that runs the tests in the background makes all of them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        events.send(f"pid {os.getpid()}".encode())
        status = run(config, events)
        _end(status)
    _, status = os.waitpid(pid, 0)
    events.send(f"exit {os.waitstatus_to_exitcode(status)}".encode())


def _end(status: int) -> None:
    """Exit like a script: join threads and workers, and run the `atexit` functions.

    Only the C++ destructors are skipped, because they sometimes abort while destroying the remains
    of torch's thread pool, which a fork does not copy.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _requests(control: socket.socket) -> Iterator[tuple[dict[str, Any], socket.socket]]:
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not message:
            return
        yield json.loads(message), socket.socket(fileno=descriptors[0])


def warm_up() -> None:
    """Iterate a small stream once, so that jobs are forked with the compiled kernels in memory.

    So are the modules of S3's client, which take a second to import in a job and in each worker.
    """
    boto3.session.Session().client("s3", region_name="us-east-1").close()
    with tempfile.TemporaryDirectory() as folder:
        write_stream_files(Path(folder, "s0"), [5, 300])
        dataset = PackedStreamingDataset(
            local=os.path.join(folder, "s0"), packing=Packing(max_seq_len=256), world=World()
        )
        for _ in PackedDataLoader(dataset):
            pass


def serve(control: socket.socket) -> None:
    """Start a job for each request until the other side closes."""
    warm_up()
    control.send(b"ready")
    for config, events in _requests(control):
        if os.fork() == 0:
            control.close()
            _mind(config, events)
            sys.exit(0)
        events.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
