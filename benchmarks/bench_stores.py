"""Remote streams: speed and CPU of a first epoch from S3, and start-up with 1,000 shards.

::

    python benchmarks/bench_stores.py --against ../another-checkout

    rclone serve s3 <-- first epoch into an empty local folder, in a new process

The store is rclone on this machine. Its CPU time does not count, but it needs a core for itself.
`--against` also measures another checkout of streampack, alternating run by run.

Cost: about 3 minutes with `--against`, 1.5 GB of disk.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_start
import record
import workloads

KEY, SECRET = "bench", "bench-secret"
MAX_SEQ_LEN, BATCH_SIZE = 4096, 8
NUM_SHARDS = 1000

PROGRAM = """
import json, resource, sys, time
from streampack import Order, PackedDataLoader, PackedStreamingDataset, Packing, Stream

def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)

def batches(remote, local):
    packing = Packing(max_seq_len=4096)
    stream = Stream(remote=remote, local=local)
    return PackedDataLoader(PackedStreamingDataset(
        [stream], packing=packing, order=Order(seed=17), batch_size=8))

remote, local, only_first = sys.argv[1], sys.argv[2], sys.argv[3] == "start"
next(iter(batches(remote.rsplit("/", 1)[0] + "/small", local + "-small")))
before, begin = cpu(), time.perf_counter()
for batch in batches(remote, local):
    if only_first:
        break
print(json.dumps({"seconds": time.perf_counter() - begin, "cpu_s": cpu() - before}), flush=True)
"""


@contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """Serve a folder as S3 until the block ends; yield the environment that points to it."""
    rclone = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [rclone, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{KEY},{SECRET}", "--config", os.devnull]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                process.wait(0) if process.poll() is not None else time.sleep(0.05)
        yield {
            **os.environ,
            "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
    finally:
        process.kill()
        process.wait()


def run(tree: Path, name: str, environment: dict[str, str], what: str) -> dict[str, float]:
    """Return the measurement of one checkout, made in a new process."""
    with tempfile.TemporaryDirectory() as local:
        command = [sys.executable, "-c", PROGRAM, f"s3://bucket/{name}", f"{local}/local", what]
        environment = environment | {"PYTHONPATH": str(tree)}
        done = subprocess.run(
            command, check=True, capture_output=True, cwd=tree, env=environment, timeout=600
        )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    """Print a line for each stream and checkout."""
    parser = record.options(__doc__, runs=3, num_samples=100_000)
    parser.add_argument("--against", type=Path, help="another checkout of streampack")
    parser.add_argument("--shards", type=int, default=NUM_SHARDS, help="of the stream that starts")
    args = parser.parse_args()
    root = args.data / "stores"
    bucket = root / "bucket"
    bucket.mkdir(parents=True, exist_ok=True)
    streams = {"small": bench_start.fake_stream(args.data, 2)}
    for compression in (None, "zstd"):
        name = compression or "raw"
        streams[name] = workloads.write("web", args.data, compression, args.num_samples)
    streams["start"] = bench_start.fake_stream(args.data, args.shards)
    for name, path in streams.items():
        if not (bucket / name).exists():
            shutil.copytree(path, bucket / name, copy_function=os.link)
    trees = {"streampack": record.HOME} | ({"before": args.against} if args.against else {})
    with served(root) as environment:
        for name in ("raw", "zstd", "start"):
            runs: dict[str, list[Any]] = {tree: [] for tree in trees}
            for _ in range(args.runs):
                for tree, path in trees.items():
                    runs[tree].append(run(path, name, environment, name))
            files = sum(each.stat().st_size for each in (bucket / name).glob("shard.*"))
            for tree, measured in runs.items():
                params = {"stream": name, "num_samples": args.num_samples, "tree": tree}
                params |= {"max_seq_len": MAX_SEQ_LEN, "batch_size": BATCH_SIZE}
                seconds = sorted(each["seconds"] for each in measured)
                cpu_s = sorted(each["cpu_s"] for each in measured)[len(measured) // 2]
                more = {"megabytes": round(files / 1e6), "cpu_s": round(cpu_s, 2)}
                if name != "start":
                    more["cpu_s_per_gb"] = round(cpu_s / files * 1e9, 2)
                line = record.line(f"stores/{name}", "s", seconds, params, **more)
                record.emit(line, args.out)


if __name__ == "__main__":
    main()
