"""Planning: nanoseconds of processor time per sample, with and without packing.

::

    python benchmarks/bench_plan.py --case streams

    plan/web, plan/sft      one stream: all of it, and order and mixing alone
    plan/method             each batching method and weight unit, three streams
    plan/streams            1, 10 and 100 streams with as many samples together
    plan/lanes              1, 8 and 64 lanes
    plan/tiny               99 % of one stream and 1 % of one of a few samples, or blocks of a few,
                            over the same without them in this run
    plan/chapters           runs of 1 and of 5 chapters with changing weights, over one without
    plan/world              64 lanes and 1, 8 or 64 devices: one process, per sample it delivers

There are no tokens, only lengths in memory. The cases take turns, after a first round that compiles
the kernels and does not count.

Cost: about 45 s.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import record
import workloads

from streampack.chapters import Chapter, Ramp
from streampack.config import Mixing, Order, Packing
from streampack.mix.weights import Weight, resolve_weights
from streampack.plan.chapter_recipes import chapter_recipes
from streampack.plan.device_plan import DeviceView, touched_lanes
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.sample_order import SampleOrder
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.types import Int64Array

BATCH_SIZE = 8
METHODS = ("random", "stratified", "per_stream", "device_per_stream")
SHARD_BYTES = 64 << 20
MANY_SAMPLES = 500_000  # enough for several chunks in each of 64 lanes
LONG_RUN = 2_000_000  # so that a chapter has several windows of packs


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned."""

    name: str
    workload: str = "web"
    max_seq_len: int = 8192
    num_streams: int = 1
    num_lanes: int = 1
    num_devices: int = 1
    num_samples: int | None = None
    tiny: int | None = None
    """Samples of a second stream that is a hundredth of the mixture; 0: none."""
    block_size: int | None = None
    num_chapters: int = 0
    """Chapters of a run that is as long as an epoch; 0: an epoch."""
    mixing: dict[str, Any] = field(default_factory=dict)
    packs: bool = True
    """False: order and mixing alone."""

    @property
    def params(self) -> dict[str, Any]:
        """What the line says of it."""
        fields = {
            name: value for name, value in vars(self).items() if name not in ("name", "mixing")
        }
        return fields | self.mixing


def cases() -> list[Case]:
    """Return all cases, in the order of the tables."""
    made = []
    for workload, max_seq_len in (("web", 8192), ("sft", 2048)):
        made.append(Case(name=workload, workload=workload, max_seq_len=max_seq_len))
        made.append(Case(name=workload, workload=workload, max_seq_len=max_seq_len, packs=False))
    for method in METHODS:
        made.append(Case(name="method", num_streams=3, mixing={"batching_method": method}))
    made.append(Case(name="method", num_streams=3, mixing={"weight_unit": "tokens"}))
    made += [Case(name="streams", num_streams=count) for count in (1, 10, 100)]
    many = {"num_samples": MANY_SAMPLES}
    made += [Case(name="lanes", num_lanes=count, **many) for count in (1, 8, 64)]
    by_tokens = {"num_samples": 100_000, "mixing": {"weight_unit": "tokens"}}
    for lanes, tiny in itertools.product((1, 16, 64), (0, 1, 3, 50)):
        made.append(Case(name="tiny", num_lanes=lanes, tiny=tiny, **by_tokens))
    for lanes, size in itertools.product((1, 16, 64), (1, 2, 3)):
        made.append(Case(name="tiny", num_lanes=lanes, tiny=0, block_size=size, **by_tokens))
    for method in METHODS:
        mixing = {"batching_method": method, "epoch_end": "carry"}
        for count in (0, 1, 5):
            options = {"num_samples": LONG_RUN, "num_chapters": count, "mixing": mixing}
            made.append(Case(name="chapters", num_streams=3, **options))
    # Rolling on, no process has to know where the lanes of others end.
    rolling = {"epoch_end": "carry"}
    made += [
        Case(name="world", num_lanes=64, num_devices=count, mixing=rolling, **many)
        for count in (1, 8, 64)
    ]
    return made


def plan_stream(
    lengths: Int64Array, number: int, mixing: Mixing, tokens: int | None = None
) -> PlanStream:
    """Return a stream in shards of 64 MiB; an epoch takes all of it, or `tokens`."""
    shard = max(int(SHARD_BYTES / (4 * lengths.mean())), 1)
    bounds = np.append(np.arange(0, len(lengths), shard), len(lengths))
    weights = [Weight(name="samples", choose=tokens)]
    [quota] = resolve_weights(
        weights, [(len(lengths), int(lengths.sum()))], unit=mixing.weight_unit
    )
    return PlanStream(
        name=f"stream-{number}",
        first_sample=bounds,
        raw_bytes=4 * np.add.reduceat(lengths, bounds[:-1]),
        num_tokens=int(lengths.sum()),
        lengths_of=lambda s: lengths[bounds[s] : bounds[s + 1]],
        quota=quota,
    )


def make_recipe(case: Case, num_samples: int | None) -> Recipe:
    """Return the recipe of a case; its streams share the workload's samples."""
    lengths = workloads.lengths(case.workload, num_samples or case.num_samples)
    mixing = Mixing(**case.mixing)
    streams = tuple(
        plan_stream(part, number, mixing)
        for number, part in enumerate(np.array_split(lengths, case.num_streams))
    )
    if case.tiny:
        streams += (plan_stream(lengths[: case.tiny], 1, mixing, int(lengths.sum()) // 99),)
    return Recipe(
        streams=streams,
        packing=Packing(max_seq_len=case.max_seq_len),
        mixing=mixing,
        order=Order(seed=17, shuffle_block_size=case.block_size),
        num_lanes=case.num_lanes,
        lane_turn=BATCH_SIZE,
        global_batch_size=BATCH_SIZE * case.num_lanes,
    )


def make_run(recipe: Recipe, num_chapters: int) -> RunPlan:
    """Return a run of chapters over the streams of a recipe, as long as its epoch."""
    names = recipe.names
    steps = recipe.packs_per_carry_epoch // recipe.global_batch_size
    kept = {name: Fraction(1, len(names)) for name in names}
    changing = kept | {names[0]: Ramp(0.2, 0.4), names[1]: Ramp(0.4, 0.2)}
    chapters = [
        Chapter(weights=changing if number % 2 else kept, steps=steps // num_chapters)
        for number in range(num_chapters)
    ]
    recipes = chapter_recipes(
        recipe.streams,
        chapters,
        packing=recipe.packing,
        mixing=replace(recipe.mixing, epoch_end="pad", global_batch_size=recipe.global_batch_size),
        order=recipe.order,
        num_lanes=recipe.num_lanes,
        lane_turns=[recipe.lane_turn] * num_chapters,
    )
    return RunPlan(recipes)


def begin_plan(recipe: Recipe, view: DeviceView, num_chapters: int) -> PackSequence:
    """Return the sequence of a device."""
    if not num_chapters:
        return PackSequence(RunPlan([recipe], [view]))
    return PackSequence(make_run(recipe, num_chapters).seen([view] * num_chapters))


def plan(
    recipe: Recipe,
    view: DeviceView,
    each: Callable[[Any], None] | None = None,
    num_chapters: int = 0,
) -> float:
    """Plan one device's batches of an epoch; return the processor seconds it took."""
    begin = time.process_time()
    sequence = begin_plan(recipe, view, num_chapters)
    while (batch := sequence.next()) is not None:
        if each is not None:
            each(batch)
    sequence.close()
    return time.process_time() - begin


def draw(recipe: Recipe) -> float:
    """Go through order and mixing of an epoch; return the processor seconds it took."""
    begin = time.process_time()
    for lane, queue in itertools.product(range(recipe.num_lanes), range(recipe.num_queues)):
        arrivals = SampleOrder(recipe, lane, queue, 0)
        while len(arrivals.next()):
            pass
    return time.process_time() - begin


def delivered(recipe: Recipe, view: DeviceView, num_chapters: int) -> dict[str, Any]:
    """Plan once and count what the device gets; compiles the kernels, too."""
    counts = {"samples": 0.0, "packs": 0, "tokens": 0}

    def count(batch: Any) -> None:
        rows = batch.packs.segments
        # A sample counts once however it is cut, so its pieces count by their share.
        counts["samples"] += float((rows[:, 4] / rows[:, 5]).sum())
        counts["tokens"] += int(rows[:, 4].sum())
        counts["packs"] += len(batch.packs)

    plan(recipe, view, count, num_chapters)
    fill = counts["tokens"] / (counts["packs"] * recipe.packing.max_seq_len)
    lanes = len(touched_lanes(recipe, view))
    return {"samples": round(counts["samples"]), "fill": round(fill, 6), "lanes_planned": lanes}


def main() -> None:
    """Print one line a case."""
    parser = record.options(__doc__, runs=5)
    parser.add_argument("--case", nargs="+", help="names of cases; by default all")
    args = parser.parse_args()
    chosen = [case for case in cases() if not args.case or case.name in args.case]
    ready = []
    for case in chosen:
        recipe = make_recipe(case, args.num_samples)
        view = DeviceView(num_devices=case.num_devices, batch_size=BATCH_SIZE)
        ready.append((case, recipe, view, delivered(recipe, view, case.num_chapters)))
    runs: list[list[float]] = [[] for _ in ready]
    for _ in range(args.runs):
        for number, (case, recipe, view, counts) in enumerate(ready):
            chapters = case.num_chapters
            seconds = plan(recipe, view, None, chapters) if case.packs else draw(recipe)
            runs[number].append(1e9 * seconds / counts["samples"])
    plain = {
        case.num_lanes: min(of_case)
        for (case, *_), of_case in zip(ready, runs, strict=True)
        if case.tiny == 0 and case.block_size is None
    }
    epochs = {
        case.mixing["batching_method"]: min(of_case)
        for (case, *_), of_case in zip(ready, runs, strict=True)
        if case.name == "chapters" and not case.num_chapters
    }
    for (case, _, _, counts), of_case in zip(ready, runs, strict=True):
        if case.name == "chapters" and case.num_chapters:
            counts["ratio"] = round(min(of_case) / epochs[case.mixing["batching_method"]], 3)
        if case.name == "tiny":
            counts["ratio"] = round(min(of_case) / plain[case.num_lanes], 3)
        bench = f"plan/{case.name}"
        record.emit(record.line(bench, "ns/sample", of_case, case.params, **counts), args.out)


if __name__ == "__main__":
    main()
