"""Steps: how many documents a global batch has, and how long the ranks of a step wait.

::

    python benchmarks/bench_steps.py --case spread

    steps/spread       effective documents of a global batch, 1 / (sum of squared shares of tokens),
                       over those of the same packs shuffled over the epoch
    steps/straggler    time of a step over the ideal one by the cost of attention: 64 ranks, 8 a
                       node, 8 steps of one pack in a global batch; each rank waits for all
    steps/equal_cost   tokens for the time of a step, over those of full packs of max_seq_len: 64
                       ranks, one step of one pack in a global batch; at 1.5 and 1 times the memory,
                       with rows of all slots, and of used ones rounded up to a multiple
    steps/deal         microseconds of processor time to deal a global batch of 512 packs

No tokens: lengths in memory.

Cost: about a minute.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import record
import workloads
from bench_plan import plan_stream

from streampack.balance import AttentionCost, Balance
from streampack.config import Mixing, Order, PackCost, Packing
from streampack.plan.deal import deal_by_cost, step_time
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.types import LENGTH, SAMPLE, Int64Array, Packs

WINDOWS = [0, None, 131_072]
TEXT_BLOCK = 8 * (4 << 20)  # bytes of text in the shuffle block of a source of texts
BYTES_PER_TOKEN = 4
NUM_RANKS, RANKS_PER_NODE, NUM_STEPS = 64, 8, 8
MODELS = [("web", 8192), ("web", 32_768), ("half-long", 131_072)]


def recipe_of(
    lengths: Int64Array,
    max_seq_len: int,
    size: int,
    num_lanes: int = 1,
    window: int | None = None,
    *,
    is_text: bool = False,
) -> Recipe:
    """Return a recipe of one stream, with the shuffle blocks of a source of texts if it is one."""
    mixing = Mixing(global_batch_size=size)
    block = int(TEXT_BLOCK / BYTES_PER_TOKEN / lengths.mean()) if is_text else None
    return Recipe(
        streams=(replace(plan_stream(lengths, 0, mixing), block_samples=block),),
        packing=Packing(max_seq_len=max_seq_len),
        mixing=mixing,
        order=Order(seed=17, pack_shuffle=window),
        num_lanes=num_lanes,
        lane_turn=min(8, size),
        global_batch_size=size,
    )


def batches_of(recipe: Recipe) -> Iterator[Packs]:
    """Yield the packs of each whole global batch."""
    size = recipe.global_batch_size
    sequence = PackSequence(RunPlan([recipe], [DeviceView(batch_size=size)]))
    while (batch := sequence.next()) is not None:
        if len(batch.packs) == size:
            yield batch.packs
    sequence.close()


def effective_documents(packs: Packs, order: Int64Array, size: int) -> float:
    """Return the mean effective documents of global batches of packs in an order."""
    rank = np.empty(len(packs), np.int64)
    rank[order] = np.arange(len(packs))
    batch_of = np.repeat(rank // size, np.diff(packs.ends, prepend=0))
    samples = packs.segments[:, SAMPLE]
    by_sample = np.lexsort((samples, batch_of))
    batch_of, samples = batch_of[by_sample], samples[by_sample]
    is_first = np.ones(len(samples), bool)
    is_first[1:] = (np.diff(samples) != 0) | (np.diff(batch_of) != 0)
    firsts = np.flatnonzero(is_first)
    tokens = np.add.reduceat(packs.segments[by_sample, LENGTH].astype(np.float64), firsts)
    totals = np.bincount(batch_of[firsts], tokens)
    squares = np.bincount(batch_of[firsts], tokens**2)
    return float(np.mean(totals**2 / squares))


def spread(num_samples: int | None, args: Any) -> None:
    """Print how many documents global batches hold."""
    shapes = [(2048, 32), (2048, 256), (4096, 64)]
    kinds = [*((window, False) for window in WINDOWS), (None, True)]
    for workload, (length, size), lanes, (window, is_text) in itertools.product(
        ("web", "code", "long"), shapes, (1, 4, 8), kinds
    ):
        lengths = workloads.lengths(workload, num_samples)
        recipe = recipe_of(lengths, length, size, lanes, window, is_text=is_text)
        packs = Packs.join(list(batches_of(recipe)))
        count = len(packs) // size * size
        packs = packs.slice(0, count)
        shuffled = np.random.default_rng(0).permutation(count)
        best = effective_documents(packs, shuffled, size)
        own = effective_documents(packs, np.arange(count), size)
        params = {
            "workload": workload,
            "max_seq_len": length,
            "global_batch_size": size,
            "num_lanes": lanes,
            "pack_shuffle": window,
            "is_text": is_text,
        }
        fields = {"share_of_a_full_shuffle": round(own / best, 3), "packs": count}
        record.emit(record.line("steps/spread", "documents", [own], params, **fields), args.out)


def model_lengths(workload: str, num_samples: int | None) -> Int64Array:
    """Return a workload's lengths; half-long: half of all tokens in documents of up to 131,072."""
    if workload != "half-long":
        return workloads.lengths(workload, num_samples)
    short = workloads.lengths("web", num_samples)
    generator = np.random.default_rng(0)
    drawn = np.exp(generator.uniform(np.log(32_768), np.log(131_072), len(short))).astype(np.int64)
    long = drawn[: np.searchsorted(np.cumsum(drawn), short.sum()) + 1]
    lengths: Int64Array = generator.permutation(np.concatenate([short, long]))
    return lengths


def dealt_times(costs: Int64Array, within: str) -> float:
    """Return the straggler factor of a global batch, shape (NUM_STEPS, NUM_RANKS)."""
    if within == "none":
        return step_time(costs)
    size = {"rank": 1, "node": RANKS_PER_NODE, "batch": NUM_RANKS}[within]
    groups = np.split(costs, NUM_RANKS // size, axis=1)
    dealt = [group.ravel()[deal_by_cost(group.ravel(), NUM_STEPS, size)] for group in groups]
    return step_time(np.concatenate([own.sum(axis=2) for own in dealt], axis=1))


def straggler(num_samples: int | None, args: Any) -> None:
    """Print how long steps take, and what dealing costs."""
    balance = Balance(cost=AttentionCost(hidden_size=4096))
    size = NUM_RANKS * NUM_STEPS
    for workload, length in MODELS:
        # Enough packs for some global batches of the longest.
        lengths = model_lengths(workload, num_samples or 8 * workloads.NUM_SAMPLES["web"])
        costs = [balance.costs(packs) for packs in batches_of(recipe_of(lengths, length, size))]
        for within in ("none", "rank", "node", "batch"):
            times = [dealt_times(own.reshape(NUM_STEPS, NUM_RANKS), within) for own in costs]
            params = {"workload": workload, "max_seq_len": length, "within": within}
            params |= {"ranks": NUM_RANKS, "ranks_per_node": RANKS_PER_NODE, "steps": NUM_STEPS}
            record.emit(record.line("steps/straggler", "x ideal", times, params), args.out)
        for devices, batch_size in ((64, 1), (16, 4)):
            runs = []
            for own in costs[: args.runs]:
                begin = time.process_time()
                for _ in range(20):
                    deal_by_cost(own, len(own) // devices // batch_size, devices)
                runs.append(1e6 * (time.process_time() - begin) / 20)
            params = {"workload": workload, "max_seq_len": length, "batch_size": batch_size}
            record.emit(record.line("steps/deal", "us", runs, params, packs=size), args.out)


def tokens_per_time(
    packs: list[Packs], cost: AttentionCost, row_tokens: int, multiple: int
) -> tuple[float, int]:
    """Return the tokens of global batches over their time, and the number of sizes of rows.

    Each rank has one pack of a batch. Padding up to a multiple, at most of a row, is one more
    document.
    """
    tokens, time_spent, sizes = 0.0, 0.0, set()
    for own in packs:
        lengths = own.segments[:, LENGTH]
        firsts = np.append(0, own.ends[:-1])
        used = np.add.reduceat(lengths, firsts)
        slots = np.minimum(-(-used // multiple) * multiple, row_tokens)
        time_spent += (np.add.reduceat(cost(lengths), firsts) + cost(slots - used)).max()
        tokens += lengths.sum()
        sizes.update(slots.tolist())
    return tokens / time_spent, len(sizes)


def equal_cost(num_samples: int | None, args: Any) -> None:
    """Print what packs of equal cost gain without a balance, by the slots that are computed."""
    cost = AttentionCost(hidden_size=4096)
    for workload, length in MODELS:
        lengths = model_lengths(workload, num_samples or 8 * workloads.NUM_SAMPLES["web"])
        plain_packs = list(batches_of(recipe_of(lengths, length, NUM_RANKS)))
        plain, _ = tokens_per_time(plain_packs, cost, length, length)
        least = int(np.ceil(cost(np.array([length]))[0]))
        for capacity in (length, length * 3 // 2):
            recipe = recipe_of(lengths, length, NUM_RANKS)
            packing = Packing(max_seq_len=length, cost=PackCost(least, capacity=capacity))
            packs = list(batches_of(replace(recipe, packing=packing)))
            tokens = np.array([own.segments[:, LENGTH].sum() for own in packs])
            for pad_to in (capacity, length // 8, length // 16, length // 32, 1):
                speed, num_sizes = tokens_per_time(packs, cost, capacity, pad_to)
                params = {"workload": workload, "max_seq_len": length, "ranks": NUM_RANKS}
                params |= {"capacity": capacity, "max_cost": least, "pad_to": pad_to}
                fields = {
                    "sizes_of_rows": num_sizes,
                    "tokens_per_pack": round(float(tokens.mean()) / NUM_RANKS),
                    "tokens_spread": round(float(tokens.std() / tokens.mean()), 4),
                }
                gains = [speed / plain]
                line = record.line("steps/equal_cost", "x of full packs", gains, params, **fields)
                record.emit(line, args.out)


def main() -> None:
    """Print one line for each case."""
    parser = record.options(__doc__, runs=5)
    cases = {"spread": spread, "straggler": straggler, "equal_cost": equal_cost}
    parser.add_argument("--case", nargs="+", choices=cases, help="by default all")
    args = parser.parse_args()
    for name in args.case or cases:
        cases[name](args.num_samples, args)


if __name__ == "__main__":
    main()
