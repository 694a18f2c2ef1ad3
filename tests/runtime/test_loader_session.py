"""A script can end in the middle of an iteration."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.builders import write_stream_files

pytestmark = [pytest.mark.processes, pytest.mark.own_start]

CHILD = """
import os, sys, threading
from torch.utils.data import DataLoader
from streampack import (IterableStream, Order, PackedDataLoader, PackedIterableDataset,
    PackedStreamingDataset, Packing, Stream, World)

packing, shards = Packing(max_seq_len=64), sys.argv[1]

def remote(name):
    streams = [Stream(remote=shards, local=os.path.join(sys.argv[2], name))]
    return PackedStreamingDataset(streams, packing=packing)

def of_four_lanes():
    return PackedStreamingDataset([Stream(local=shards)], packing=packing,
        order=Order(num_lanes=4), world=World(rank=0, num_ranks=4))

def iterable():
    return PackedIterableDataset([IterableStream([[1, 2, 3]] * 10_000)], packing=packing)

held = {
    "threads": iter(PackedDataLoader(remote("threads"))),
    "loop alone": iter(PackedDataLoader(remote("loop"), prefetch_threads=0)),
    "workers": iter(PackedDataLoader(remote("workers"), num_workers=2)),
    "dataset": iter(remote("dataset")),
    "torch": iter(DataLoader(remote("torch"), batch_size=None, num_workers=1)),
    "iterable": iter(PackedDataLoader(iterable())),
    "iterable, workers": iter(PackedDataLoader(iterable(), num_workers=1)),
    "lane ends": iter(PackedDataLoader(of_four_lanes())),
}
names = set()
for way, batches in held.items():
    for _ in range(25 if way == "lane ends" else 1):
        next(batches)
        names |= {each.name for each in threading.enumerate()}
        assert all(each.daemon for each in threading.enumerate()[1:])
assert {"streampack-read-0", "streampack-fetch-0"} <= names, names
"""


def test_a_script_that_holds_iterations_ends_without_a_word(tmp_path):
    path, _ = write_stream_files(tmp_path / "shards", [20] * 400, hashes=["xxh64"])

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, str(path), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (0, "")
