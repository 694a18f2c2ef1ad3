"""Our `compat.torchtune.PackedDataset` and torchtune's own: one JSON line per class and measure.

::

    python benchmarks/bench_compat.py --num-samples 52002 --max-seq-len 4096

Two measures, in seconds: constructing the dataset, and constructing it and reading each item once.
Samples are dicts of lists, as torchtune's tokenizers return them. If torchtune cannot be imported,
its line gives the reason. The classes take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import record

from streampack.compat.torchtune import PackedDataset

SIGMA = 0.6  # of the lengths' logarithm


def instruction_samples(num_samples: int, mean: int, max_seq_len: int) -> list[dict[str, Any]]:
    """Return samples of short instructions with about this mean length."""
    normal = np.random.Generator(np.random.Philox(key=0)).standard_normal(num_samples)
    lengths = np.exp(np.log(mean) - SIGMA**2 / 2 + SIGMA * normal).clip(1, max_seq_len)
    tokens = list(range(max_seq_len + 1))
    return [
        {"tokens": tokens[:length], "labels": tokens[1 : length + 1]}
        for length in lengths.astype(int).tolist()
    ]


def torchtunes_own() -> Callable[..., Any] | str:
    """Return torchtune's class, or the reason why it is missing."""
    try:
        sys.path.append(record.SITE)
        import_module("torchvision_operators").declare_on_import()
        return import_module("torchtune.datasets").PackedDataset
    except Exception as error:  # with other versions of torch, it can fail in many ways
        words = " ".join(str(error).split())
        return f"{type(error).__name__}: {words}"


def seconds(packed: Callable[..., Any], samples: list[dict[str, Any]], max_seq_len: int) -> Any:
    """Return the seconds to construct the dataset, to construct and read it, and its packs."""
    begin = time.perf_counter()
    dataset = packed(samples, max_seq_len=max_seq_len)
    made = time.perf_counter() - begin
    for number in range(len(dataset)):
        dataset[number]
    return made, time.perf_counter() - begin, len(dataset)


def main() -> None:
    """Print one line for each class and measure."""
    parser = record.options(__doc__, num_samples=52_002)
    parser.add_argument("--mean-length", type=int, default=125)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    args = parser.parse_args()
    samples = instruction_samples(args.num_samples, args.mean_length, args.max_seq_len)
    classes = {"streampack": PackedDataset, "torchtune": torchtunes_own()}
    measured: dict[str, list[Any]] = {name: [] for name in classes}
    for _ in range(args.runs):
        for name, packed in classes.items():
            if callable(packed):
                measured[name].append(seconds(packed, samples, args.max_seq_len))
    params = {**vars(args), "lengths": f"lognormal, sigma {SIGMA}, Philox key 0"}
    fields = {"tokens": sum(len(sample["tokens"]) for sample in samples)}
    for name, packed in classes.items():
        if not callable(packed):
            record.emit(record.skipped(f"compat/torchtune/{name}", packed, params), args.out)
            continue
        fields["packs"] = measured[name][0][2]
        for column, what in enumerate(("make", "make_and_read")):
            bench, runs = f"compat/torchtune/{name}/{what}", [row[column] for row in measured[name]]
            line = record.line(bench, "s", runs, params, ("torchtune",), **fields)
            record.emit(line, args.out)


if __name__ == "__main__":
    main()
