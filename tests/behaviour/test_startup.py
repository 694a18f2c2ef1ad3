"""A start loads only what the run needs; its time and memory do not grow with the streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces, write_length_file
from tests.helpers.builders import write_stream_files

NUM_SHARDS = 2700
SAMPLES = 18_520  # per shard, so 50 million in total

CHILD = """
import json, re, sys, time
import streampack.loader.loader, streampack.streams
from streampack import Mixing, Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream

def resident(peak):
    text = open("/proc/self/status").read()
    return int(re.search(("VmHWM" if peak else "RssAnon") + r":\\s+(\\d+)", text)[1]) / 1024

def start(method, path):
    begin = time.process_time()  # a busy machine needs longer by the clock
    dataset = PackedStreamingDataset(
        [Stream(local=path)], packing=Packing(max_seq_len=2048),
        mixing=Mixing(batching_method=method), order=Order(seed=1), batch_size=4)
    batches = iter(PackedDataLoader(dataset))
    next(batches)
    seconds = time.process_time() - begin
    for _ in range(50):
        next(batches, None)
    return seconds

used = {}
for method in ("random", "stratified"):
    start(method, sys.argv[1])  # compiles and warms up, on a small stream
    before = resident(peak=False)
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    files = resident(peak=True) - before  # mapped files, not our memory
    seconds = start(method, sys.argv[2])
    used[method] = {"seconds": seconds, "mib": resident(peak=True) - files - before}
print(json.dumps(used))
"""

# Prints the modules and libraries that a process has loaded after its first batch. A child process
# warms up numba's cache first, so that nothing from that is loaded here.
LOADED = """
import json, os, sys

def start(path):
    import torch
    before = set(sys.modules)
    from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream
    dataset = PackedStreamingDataset(
        [Stream(local=path)], packing=Packing(max_seq_len=512), order=Order(seed=1), batch_size=4)
    next(iter(PackedDataLoader(dataset)))
    return before

if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    start(sys.argv[1])
    os._exit(0)
before = start(sys.argv[1])
from numba.core.registry import CPUDispatcher
kernels = {}
for name, module in sys.modules.items():
    if name.startswith("streampack."):
        for kernel in vars(module).values():
            if isinstance(kernel, CPUDispatcher) and kernel.overloads:
                stats = kernel.stats
                label = kernel.py_func.__module__ + "." + kernel.py_func.__name__
                hits, misses = stats.cache_hits.values(), stats.cache_misses.values()
                kernels[label] = [len(kernel.overloads), sum(hits), sum(misses)]
print(json.dumps({"kernels": kernels, "modules": sorted(set(sys.modules) - before)}))
"""
# Kernels that the first batch of a local stream calls.
KERNELS = {
    "streampack.batch.kernels.fill_batches",
    "streampack.batch.kernels.lay_out",
    "streampack.gather.kernels.gather_tokens",
    "streampack.gather.lookup_kernels.find_rows",
    "streampack.order.shuffle._put_rows",
    "streampack.pack.best_fit_decreasing.place_segments",
    "streampack.pack.best_fit_decreasing.write_placed",
    "streampack.pack.overflow._count",
    "streampack.pack.overflow._write",
    "streampack.plan.pack_order.copy_packs",
    "streampack.plan.slot_kernels.walk_slots",
    "streampack.rng._shuffle_rows",
}
# Clients of stores, and modules that only other parts of streampack or integrations need.
NEVER_LOADED = {
    *("adlfs", "aiohttp", "azure", "boto3", "botocore", "fsspec", "gcsfs", "google", "oci"),
    *("paramiko", "requests", "s3fs", "streaming", "urllib3"),
    *("accelerate", "datasets", "lightning", "matplotlib", "pandas", "pyarrow", "ray"),
    *("PIL", "brotli", "snappy", "tokenizers", "torchvision", "transformers"),
    *("pydantic", "rich", "typer"),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The modules that are loaded after a local stream's first batch, with kernels on disk."""
    path, _ = write_stream_files(tmp_path_factory.mktemp("loaded"), [30] * 2000, dtype="uint16")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout)


def test_a_first_local_batch_loads_the_kernels_that_it_calls_and_no_others(loaded):
    assert loaded["kernels"] == {name: [1, 1, 0] for name in KERNELS}


def test_kernels_on_disk_are_loaded_without_numbas_compiler_or_its_plug_ins(loaded):
    modules = set(loaded["modules"])

    assert "numba" in modules
    compiler = {"numba.np.arrayobj", "numba.cpython.unicode", "numba.core.typing.cffi_utils"}
    assert not modules & compiler


def test_a_first_local_batch_loads_no_cloud_library_and_no_optional_one(loaded):
    packages = {name.split(".")[0] for name in loaded["modules"]}

    assert not packages & NEVER_LOADED


def many_shards(folder: Path) -> Path:
    """A stream of 2,700 shards, which are all links to the same file."""
    path, tokens = write_stream_files(
        folder, [3] * SAMPLES, dtype="uint16", size_limit=None, lengths_file=False
    )
    index = json.loads((path / "index.json").read_text())
    [shard] = index["shards"]
    name = shard["raw_data"]["basename"]
    shards = []
    for number in range(NUM_SHARDS):
        other = f"shard.{number:05}.mds"
        if other != name:
            os.link(path / name, path / other)
        shards.append(shard | {"raw_data": shard["raw_data"] | {"basename": other}})
    text = json.dumps({"version": 2, "shards": shards}).encode()
    (path / "index.json").write_bytes(text)
    edges = np.array([[each[0], each[-1]] for each in tokens], np.uint32)
    pieces = length_file_pieces(
        text,
        parse_index(text, str(path)),
        "tokens",
        np.full(SAMPLES * NUM_SHARDS, 3, np.uint32),
        np.tile(edges, (NUM_SHARDS, 1)),
    )
    write_length_file(path / LENGTH_FILE, pieces)
    return path


def test_fifty_million_samples_start_within_5_s_and_600_mib(tmp_path):
    small, _ = write_stream_files(tmp_path / "small", [3] * 5000, dtype="uint16")
    large = many_shards(tmp_path / "large")

    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(small), str(large)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )

    for method, used in json.loads(done.stdout).items():
        assert used["seconds"] < 5, (method, used)
        assert used["mib"] < 600, (method, used)
