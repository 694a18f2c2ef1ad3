"""Planning speed: samples a second of order + mix + packers, one core, no tokens.

python benchmarks/bench_plan.py --num-samples 2000000 --max-seq-len 8192
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.mix import Weight, resolve_weights
from streampack.plan import DeviceView, EpochSequence, PlanStream, Recipe

SHARD = 18_600  # samples in a shard of 64 MiB, at 900 tokens of 4 bytes


def web_lengths(num_samples: int, seed: int) -> np.ndarray:
    """Token counts like web text: lognormal, median 400, mean about 900."""
    rng = np.random.default_rng(seed)
    return np.maximum(rng.lognormal(np.log(400), 1.27, num_samples).astype(np.int64), 1)


def recipe(args: argparse.Namespace) -> Recipe:
    """A recipe over made-up streams of web lengths."""
    streams = []
    for number in range(args.num_streams):
        lengths = web_lengths(args.num_samples // args.num_streams, number)
        bounds = np.append(np.arange(0, len(lengths), SHARD), len(lengths))
        [quota] = resolve_weights([Weight(name="web")], [(len(lengths), int(lengths.sum()))])
        streams.append(
            PlanStream(
                name=f"web-{number}",
                first_sample=bounds,
                raw_bytes=np.diff(bounds) * 3600,
                num_tokens=int(lengths.sum()),
                lengths_of=lambda s, a=lengths, b=bounds: a[b[s] : b[s + 1]],
                quota=quota,
            )
        )
    return Recipe(
        streams=tuple(streams),
        packing=Packing(max_seq_len=args.max_seq_len, method=args.method),
        mixing=Mixing(batching_method=args.batching_method, weight_unit=args.weight_unit),
        order=Order(seed=17),
        num_lanes=args.num_lanes,
        lane_run=8,
        global_batch_size=8 * args.num_lanes,
    )


def run(args: argparse.Namespace) -> dict[str, float]:
    """Plan one epoch; return seconds and fill."""
    made = recipe(args)
    begin = time.perf_counter()
    sequence = EpochSequence(made, DeviceView(batch_size=8), epoch=0)
    num_packs = tokens = 0
    first = None
    while (batch := sequence.next()) is not None:
        if first is None:
            first = time.perf_counter() - begin
        num_packs += len(batch.packs)
        tokens += int(batch.packs.segments[:, 4].sum())
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "first_batch_s": first,
        "fill": tokens / num_packs / args.max_seq_len,
        "tokens": tokens,
    }


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=1_000_000)
    parser.add_argument("--num-streams", type=int, default=3)
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--num-lanes", type=int, default=1)
    parser.add_argument("--method", default="exact_fit")
    parser.add_argument("--batching-method", default="random")
    parser.add_argument("--weight-unit", default="samples")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    warm = argparse.Namespace(**vars(args) | {"num_samples": 20_000})
    run(warm)
    runs = [run(args) for _ in range(args.repeats)]
    seconds = [one["seconds"] for one in runs]
    record = {
        "bench": "plan",
        "unit": "samples/s",
        "median": round(args.num_samples / statistics.median(seconds)),
        "runs_s": [round(s, 3) for s in seconds],
        "first_batch_s": round(statistics.median(one["first_batch_s"] for one in runs), 4),
        "epoch_fill": round(runs[0]["fill"], 6),
        "params": vars(args) | {"lengths": "lognormal(ln 400, 1.27)"},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
