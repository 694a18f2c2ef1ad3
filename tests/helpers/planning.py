"""Recipes over made-up lengths, and the packs of their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from streampack.config import Mixing, Order, Packing
from streampack.mix.weights import Quota, Weight, resolve_weights
from streampack.plan.device_plan import DeviceView
from streampack.plan.lane_ends import count_queue
from streampack.plan.lane_stream import LaneStream
from streampack.plan.pack_queue import PackQueue
from streampack.plan.recipe import PlanStream, Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.spans import RunPlan
from streampack.plan.state import Progress, decode_state, encode_state, read_state
from streampack.types import LENGTH, PASS, SAMPLE, START, STREAM, Int64Array


def plan_stream(lengths: Int64Array, number: int, shard_size: int = 64, **kwargs) -> PlanStream:
    lengths = np.asarray(lengths, np.int64)
    bounds = np.append(np.arange(0, len(lengths), shard_size), len(lengths))
    shards = [lengths[a:b] for a, b in pairwise(bounds)]
    return PlanStream(
        name=f"s{number}",
        first_sample=bounds.astype(np.int64),
        raw_bytes=np.array([4 * int(s.sum()) for s in shards], np.int64),
        num_tokens=int(lengths.sum()),
        lengths_of=lambda shard: shards[shard],
        quota=None,
        **kwargs,
    )


def recipe(
    all_lengths: list[Int64Array],
    *,
    weights: list[dict] | None = None,
    packing: Packing | None = None,
    mixing: Mixing | None = None,
    order: Order | None = None,
    num_lanes: int = 1,
    lane_turn: int = 1,
    global_batch_size: int = 8,
    slots_per_pack: Sequence[int] | None = None,
) -> Recipe:
    mixing = mixing or Mixing()
    order = order or Order(seed=3)
    slots = slots_per_pack or [1] * len(all_lengths)
    streams = [
        plan_stream(lengths, number, slots_per_pack=slots[number])
        for number, lengths in enumerate(all_lengths)
    ]
    quotas = resolve_weights(
        [
            Weight(name=s.name, **w)
            for s, w in zip(streams, weights or [{}] * len(streams), strict=True)
        ],
        [(s.num_samples, s.num_tokens) for s in streams],
        epoch_size=mixing.epoch_size,
        unit=mixing.weight_unit,
    )
    return Recipe(
        streams=tuple(replace(s, quota=q) for s, q in zip(streams, quotas, strict=True)),
        packing=packing or Packing(max_seq_len=64),
        mixing=mixing,
        order=order,
        num_lanes=num_lanes,
        lane_turn=lane_turn,
        global_batch_size=global_batch_size,
    )


def encode_epochs(recipe: Recipe, digests: Sequence[str], progress: Progress) -> dict:
    return encode_state(RunPlan([recipe]), digests, progress)


def decode_epochs(state: dict, recipe: Recipe, digests: Sequence[str]) -> Progress:
    return decode_state(read_state(state), RunPlan([recipe]), digests)


def epoch_sequence(recipe: Recipe, view: DeviceView, start: Progress | None = None) -> PackSequence:
    """Return one device's batches of one epoch, from a position on."""
    return PackSequence(RunPlan([recipe], [view]), start)


def device_batches(recipe: Recipe, view: DeviceView, epoch: int = 0, **kwargs) -> list:
    sequence = epoch_sequence(recipe, view, Progress(epoch=epoch, **kwargs))
    batches = []
    while (batch := sequence.next()) is not None:
        batches.append(batch)
    sequence.close()
    return batches


def all_packs(recipe: Recipe, views: list[DeviceView], epoch: int = 0, **kwargs) -> list[list]:
    """The packs of the canonical sequence in order, as all devices read them, without padding."""
    per_device = [device_batches(recipe, view, epoch, **kwargs) for view in views]
    steps = {len(batches) for batches in per_device}
    assert len(steps) == 1, f"devices take {steps} steps"
    packs = []
    # Batch k goes to the device at place k mod devices, no matter where the run resumes.
    first = kwargs.get("position", 0) // views[0].batch_size % len(views)
    for step in zip(*per_device[first:], *per_device[:first], strict=True):
        assert len({batch.position for batch in step}) == 1
        for batch in step:
            packs += [batch.packs[i].tolist() for i in range(len(batch.packs))]
    return [pack for pack in packs if pack]


def world_views(num_devices: int, batch_size: int) -> list[DeviceView]:
    return [
        DeviceView(place=place, num_devices=num_devices, batch_size=batch_size)
        for place in range(num_devices)
    ]


def covered(
    packs: list[list], num_streams: int
) -> list[dict[tuple[int, int], list[tuple[int, int]]]]:
    """For each stream, the sorted (start, length) pieces of each (pass, sample)."""
    pieces: list[dict] = [{} for _ in range(num_streams)]
    for pack in packs:
        for row in pack:
            key = (row[PASS], row[SAMPLE])
            pieces[row[STREAM]].setdefault(key, []).append((row[START], row[LENGTH]))
    for stream in pieces:
        for value in stream.values():
            value.sort()
    return pieces


def global_batches(recipe: Recipe, epoch: int = 0, **kwargs) -> list[tuple[list, bool]]:
    size = recipe.global_batch_size
    sequence = epoch_sequence(recipe, DeviceView(batch_size=size), Progress(epoch=epoch, **kwargs))
    batches = []
    while (batch := sequence.next()) is not None:
        packs = [batch.packs[i].tolist() for i in range(len(batch.packs))]
        batches.append((packs, sequence.totals.substituted == 0))
    return batches


def lane_samples(recipe: Recipe, stream: int) -> list[list[int]]:
    lanes = [LaneStream(recipe, stream, lane) for lane in range(recipe.num_lanes)]
    return [
        sorted(set(own.take(0, recipe.streams[stream].num_samples)[:, SAMPLE].tolist()))
        for own in lanes
        if not own.is_empty
    ]


def count_packs(recipe: Recipe, epoch: int, lane: int) -> list[int]:
    return [count_queue(recipe, epoch, lane, queue) for queue in range(recipe.num_queues)]


def synthetic_stream(
    num_samples: int,
    number: int = 0,
    shard_size: int = 50_000,
    asked: list[int] | None = None,
    *,
    has_totals: bool = False,
) -> PlanStream:
    """A stream of any size, with lengths that are generated when a shard is requested."""
    bounds = np.append(np.arange(0, num_samples, shard_size), num_samples)
    sizes = np.diff(bounds)

    some = np.random.default_rng(number).lognormal(6, 1.27, shard_size)
    lengths = np.clip(some, 1, 100_000).astype(np.int64)

    def lengths_of(shard: int) -> Int64Array:
        if asked is not None:
            asked.append(shard)
        return np.roll(lengths[: sizes[shard]], shard)

    shard_tokens = np.cumsum(lengths)[sizes - 1]
    return PlanStream(
        name=f"s{number}",
        first_sample=bounds.astype(np.int64),
        raw_bytes=sizes * 3600,
        num_tokens=int(shard_tokens.sum()),
        lengths_of=lengths_of,
        quota=Quota(amount=num_samples),
        shard_tokens=shard_tokens if has_totals else None,
    )


def queue_packs(planner: PackQueue) -> Iterator[list]:
    """The packs of one queue of a lane, one by one; they never end with epoch_end="carry"."""
    number = 0
    while planner.know(number):
        [begin], [size] = planner.places(np.array([number]))
        yield planner.segments[begin : begin + size].tolist()
        number += 1
        planner.release(number)
