"""Law 9: start-up and memory do not grow with the streams. Real files, 50 million samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE, write_length_file
from tests.helpers.builders import write_stream_files

NUM_SHARDS = 2700
SAMPLES = 18_520  # of a shard: 50 million in all

CHILD = """
import json, re, sys, time
import streampack.loader.loader, streampack.streams
from streampack import Mixing, Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream

def resident(peak):
    text = open("/proc/self/status").read()
    return int(re.search(("VmHWM" if peak else "RssAnon") + r":\\s+(\\d+)", text)[1]) / 1024

def start(method, path):
    begin = time.perf_counter()
    dataset = PackedStreamingDataset(
        [Stream(local=path)], packing=Packing(max_seq_len=2048),
        mixing=Mixing(batching_method=method), order=Order(seed=1), batch_size=4)
    batches = iter(PackedDataLoader(dataset))
    next(batches)
    seconds = time.perf_counter() - begin
    for _ in range(50):
        next(batches, None)
    return seconds

used = {}
for method in ("random", "stratified"):
    start(method, sys.argv[1])  # compiles and warms up, on a small stream
    before = resident(peak=False)
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    files = resident(peak=True) - before  # what is mapped and not ours
    seconds = start(method, sys.argv[2])
    used[method] = {"seconds": seconds, "mib": resident(peak=True) - files - before}
print(json.dumps(used))
"""


def many_shards(folder: Path) -> Path:
    """A stream of 2,700 shards that are one file under 2,700 names."""
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
    write_length_file(
        path / LENGTH_FILE,
        text,
        parse_index(text, str(path)),
        "tokens",
        np.full(SAMPLES * NUM_SHARDS, 3, np.uint32),
        np.tile(edges, (NUM_SHARDS, 1)),
    )
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
