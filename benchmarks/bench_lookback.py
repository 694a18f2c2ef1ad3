"""Looking back at a long run: a step, from the start and from a state, and a sample.

::

    python benchmarks/bench_lookback.py --steps 1000000 --data /tmp/lookback

    two streams, 20 million samples     length files are whole, shards are one sparse file
    a run of 64 lanes, three chapters   128 packs of 8,192 tokens a step: 1M steps are 1T tokens

Cost: planning the run, about 5 minutes for a million steps on two cores; 300 MB of length files.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import record

from streampack import (
    Chapter,
    Mixing,
    Order,
    PackedStreamingDataset,
    Packing,
    Ramp,
    Stream,
    World,
    at,
    where,
)
from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces, write_length_file
from streampack.plan.sequence import PackSequence
from streampack.plan.state import Progress
from streampack.runtime.resumable import engine_of
from streampack.write import write_stream

SAMPLES = 20_000  # of a shard
SIZES = {"web": 800, "code": 200}  # shards
MOST = 30_000  # tokens of a sample
NUM_QUESTIONS = 4


def fake_stream(folder: Path, num_shards: int, seed: int) -> Path:
    """Return a stream of lognormal lengths, about 1,000 on average; make it if it is missing."""
    if folder.exists():
        return folder
    some = (np.full(3, 7, np.int32) for _ in range(SAMPLES))
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    write_stream(some, partial, tokens_dtype="int32", compression=None, size_limit=None, hashes=())
    [shard] = json.loads((partial / "index.json").read_text())["shards"]
    num_bytes = 4 * MOST * SAMPLES
    first = partial / shard["raw_data"]["basename"]
    os.truncate(first, num_bytes)
    shards = []
    for number in range(num_shards):
        name = f"shard.{number:05}.mds"
        if name != first.name:
            os.link(first, partial / name)
        shards.append(shard | {"raw_data": {"basename": name, "bytes": num_bytes, "hashes": {}}})
    text = json.dumps({"version": 2, "shards": shards}).encode()
    (partial / "index.json").write_bytes(text)
    lengths = np.random.default_rng(seed).lognormal(6.2, 1.1, SAMPLES * num_shards)
    pieces = length_file_pieces(
        text,
        parse_index(text, str(partial)),
        "tokens",
        np.clip(lengths, 1, MOST).astype(np.uint32),
        np.broadcast_to(np.uint32(7), (len(lengths), 2)),
    )
    write_length_file(partial / LENGTH_FILE, pieces)
    partial.rename(folder)
    return folder


def long_run(folder: Path, steps: int, method: str) -> PackedStreamingDataset:
    """Return a run of three chapters, as its rank 0 of 64 on eight nodes."""
    folder.mkdir(exist_ok=True, parents=True)
    streams = [
        Stream(name=name, local=fake_stream(folder / name, size, seed))
        for seed, (name, size) in enumerate(SIZES.items())
    ]
    first = steps * 6 // 10
    return PackedStreamingDataset(
        streams,
        packing=Packing(max_seq_len=8192),
        chapters=[
            Chapter(weights={"web": 0.8, "code": 0.2}, steps=first),
            Chapter(weights={"web": Ramp(0.8, 0.6), "code": Ramp(0.2, 0.4)}, steps=steps // 5),
            Chapter(weights={"web": 0.5, "code": 0.5}, steps=steps - first - steps // 5),
        ],
        mixing=Mixing(batching_method=method, global_batch_size=128),
        order=Order(num_lanes=64),
        batch_size=2,
        world=World(num_ranks=64, ranks_per_node=8),
    )


def measured(bench: str, seconds: list[float], args: argparse.Namespace, **counts: Any) -> None:
    """Emit a line."""
    params = {"steps": args.steps, "method": args.method, "lanes": 64}
    record.emit(record.line(f"lookback/{bench}", "s", seconds, params, **counts), args.out)


def state_of(dataset: PackedStreamingDataset, step: int) -> dict[str, Any]:
    """Return a state of all ranks after about so many steps, without training up to there."""
    engine = engine_of(dataset)
    sequence = PackSequence(engine.run.whole())
    while (plan := sequence.next(512)) and engine.step_of(plan.epoch, plan.position) < step:
        pass
    reached = Progress(
        epoch=sequence.epoch, position=sequence.position, snapshots=sequence.snapshots()
    )
    return engine._state_of(reached)


def main() -> None:
    """Ask, and emit a line for each kind of question."""
    parser = record.options(__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the run")
    parser.add_argument("--method", default="random", help="batching_method")
    args = parser.parse_args()

    def run() -> PackedStreamingDataset:
        return long_run(args.data, args.steps, args.method)

    dataset, begin = run(), time.perf_counter()
    at(dataset, args.steps - 1)
    measured("at/start", [time.perf_counter() - begin], args)
    state, times = state_of(run(), args.steps * 4 // 5), []
    for step in np.linspace(args.steps * 4 // 5 + 50, args.steps - 1, NUM_QUESTIONS).tolist():
        dataset = run()
        dataset.load_state_dict(state)
        begin = time.perf_counter()
        at(dataset, int(step))
        times.append(time.perf_counter() - begin)
    measured("at/state", times, args)
    times, found, dice = [], [], np.random.default_rng(0)
    for number in range(NUM_QUESTIONS):
        name = list(SIZES)[number % 2]
        sample = int(dice.integers(0, SIZES[name] * SAMPLES))
        dataset, begin = run(), time.perf_counter()
        found.append(len(where(dataset, name, sample)))
        times.append(time.perf_counter() - begin)
    measured("where", times, args, found=found)


if __name__ == "__main__":
    main()
