"""Runs with states and batches that are pinned, byte for byte, in `expected.json`.

``python -m tests.helpers.golden.cases`` rewrites the file. Only do that in a commit that means to
to change packs or states, and say so in its message: a change of this file affects every user.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from streampack import (
    BucketedIterableDataset,
    Bucketing,
    Chapter,
    Mixing,
    Order,
    PackCost,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Ramp,
    World,
)
from streampack.write import write_stream
from tests.helpers.batches import digest
from tests.helpers.datasets import online_dataset, planned_dataset

EXPECTED = Path(__file__).with_name("expected.json")
NUM_BATCHES = 24
SAVED_AT = (1, 16)
SIZES = {"web": (300, 700), "code": (120, 2000), "chat": (40, 90)}

Dataset = PackedStreamingDataset | PackedIterableDataset | BucketedIterableDataset


def samples(name: str) -> list[np.ndarray]:
    """Return a stream's samples, the same on every machine, with lengths like those of text."""
    number, longest = SIZES[name]
    rng = np.random.Generator(np.random.PCG64(sum(name.encode())))
    lengths = 1 + (longest * rng.random(number) ** 3).astype(np.int64)
    return [rng.integers(0, 50_000, n, dtype=np.int32) for n in lengths]


def write_streams(folder: Path) -> None:
    for name in SIZES:
        write_stream(samples(name), folder / name, compression=None, size_limit=1 << 14)


ALONE = World(rank=0, num_ranks=1)
TWO_RANKS = World(rank=1, num_ranks=2)


def planned(weights: dict[str, float] | None = None, **options: Any) -> Callable[[Path], Dataset]:
    """Return a function that makes a planned dataset over the streams in a folder."""
    shares = weights or {"web": 0.5, "code": 0.3, "chat": 0.2}
    streams = {name: {"proportion": share} for name, share in shares.items()}
    defaults = {
        "packing": Packing(max_seq_len=512),
        "order": Order(seed=17, pack_shuffle=0),
        "world": ALONE,
    }
    return lambda folder: planned_dataset(folder, streams, batch_size=2, **{**defaults, **options})


def _chapters(*chapters: Chapter, **options: Any) -> Callable[[Path], Dataset]:
    streams = {name: {} for name in SIZES}
    defaults = {
        "packing": Packing(max_seq_len=512),
        "mixing": Mixing(global_batch_size=8),
        "order": Order(seed=17, num_lanes=4),
        "world": TWO_RANKS,
    }
    options = {**defaults, **options}
    return lambda folder: planned_dataset(
        folder, streams, batch_size=2, chapters=chapters, **options
    )


def _online(streams: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], Dataset]:
    if "bucketing" not in options:
        options = {"packing": Packing(max_seq_len=512), "batch_size": 2, **options}
    sources = {name: samples(name) for name in SIZES}
    return lambda _: online_dataset(sources, streams or {}, world=ALONE, **options)


NEXT_FIT = Packing(max_seq_len=512, method="next_fit")
TWO_MIXTURES = (
    Chapter(weights={"web": 0.7, "code": 0.3}, steps=5),
    Chapter(weights={"code": 0.5, "chat": 0.5}),
)
RAMPS = (
    Chapter(weights={"web": Ramp(0.8, 0.2), "code": Ramp(0.2, 0.8)}, steps=6),
    Chapter(weights={"code": 0.6, "chat": 0.4}, steps=4),
    Chapter(weights={"web": 0.5, "code": 0.3, "chat": 0.2}),
)
CASES: dict[str, Callable[[Path], Dataset]] = {
    "random": planned(),
    "random-tokens": planned(mixing=Mixing(weight_unit="tokens")),
    "random-tokens-lanes": planned(
        mixing=Mixing(weight_unit="tokens", epoch_end="carry", global_batch_size=8),
        order=Order(seed=17, num_lanes=4, pack_shuffle=0),
        world=TWO_RANKS,
    ),
    "stratified": planned(mixing=Mixing(batching_method="stratified")),
    "stratified-lanes": planned(
        mixing=Mixing(batching_method="stratified", global_batch_size=8),
        order=Order(seed=17, num_lanes=4, pack_shuffle=0),
        world=TWO_RANKS,
    ),
    "per_stream": planned(mixing=Mixing(batching_method="per_stream")),
    "device_per_stream": planned(
        mixing=Mixing(batching_method="device_per_stream", global_batch_size=8), world=TWO_RANKS
    ),
    "carry": planned(
        mixing=Mixing(epoch_end="carry", epoch_size=200, global_batch_size=8),
        order=Order(seed=17, num_lanes=4, pack_shuffle=0),
    ),
    "carry-large": planned(  # in addition to the samples that the packer may buffer
        packing=Packing(max_seq_len=512, method="next_fit", buffer_samples=30),
        weights={"web": 1},
        mixing=Mixing(epoch_end="carry", epoch_size=200, global_batch_size=8),
        order=Order(seed=17, num_lanes=3, pack_shuffle=0),
    ),
    "drop": planned(mixing=Mixing(epoch_end="drop", epoch_size=300)),
    "per_stream-drop": planned(
        mixing=Mixing(batching_method="per_stream", epoch_end="drop", global_batch_size=2)
    ),
    "device_per_stream-drop": planned(
        mixing=Mixing(batching_method="device_per_stream", epoch_end="drop", epoch_size=300)
    ),
    "device_per_stream-carry": planned(
        mixing=Mixing(batching_method="device_per_stream", epoch_end="carry", epoch_size=60)
    ),
    "repeat": planned(weights={"chat": 1}, mixing=Mixing(epoch_size=2000)),
    "unshuffled": planned(order=Order(shuffle=False)),
    "knapsack": planned(packing=Packing(max_seq_len=512, method="knapsack", overflow="truncate")),
    "next_fit": planned(packing=Packing(max_seq_len=512, method="next_fit", eos_id=1, bos_id=2)),
    "concat": planned(packing=Packing(max_seq_len=512, method="concat", positions="continue")),
    "two_tiers": planned(packing=Packing(max_seq_len=512, method="two_tiers", short_seq_len=128)),
    "multiples": planned(
        packing=Packing(max_seq_len=512, pad_to_multiple=8, max_samples_per_pack=6)
    ),
    "compact": planned(batch_format="compact"),
    "hf": planned(batch_format="hf"),
    "spread": planned(packing=NEXT_FIT, order=Order(seed=17)),
    "spread-small": planned(packing=NEXT_FIT, order=Order(seed=17, pack_shuffle=10)),
    "spread-stratified": planned(
        packing=NEXT_FIT,
        order=Order(seed=17),
        mixing=Mixing(batching_method="stratified", global_batch_size=8),
    ),
    "spread-carry": planned(
        packing=NEXT_FIT,
        mixing=Mixing(epoch_end="carry", epoch_size=200, global_batch_size=8),
        order=Order(seed=17, num_lanes=4),
        world=TWO_RANKS,
    ),
    "windows": planned(order=Order(seed=17)),
    "windows-small": planned(
        packing=Packing(max_seq_len=512, max_samples_per_pack=3, pad_to_multiple=8),
        order=Order(seed=17, pack_shuffle=10),
    ),
    "windows-carry": planned(
        mixing=Mixing(
            batching_method="stratified", epoch_end="carry", epoch_size=200, global_batch_size=8
        ),
        order=Order(seed=17, num_lanes=4),
        world=TWO_RANKS,
    ),
    "equal-cost": planned(
        packing=Packing(max_seq_len=512, cost=PackCost(800, hidden_size=100)),
        batch_format="compact",
        order=Order(seed=17, num_lanes=4),
        mixing=Mixing(epoch_end="carry", batching_method="stratified", global_batch_size=8),
    ),
    "windows-unshuffled": planned(
        packing=Packing(max_seq_len=512, method="best_fit_decreasing"), order=Order(shuffle=False)
    ),
    "chapters": _chapters(*TWO_MIXTURES),
    "chapters-alone": _chapters(
        *TWO_MIXTURES, world=ALONE, order=Order(seed=17, num_lanes=1, pack_shuffle=0)
    ),
    "chapters-stratified": _chapters(
        *TWO_MIXTURES, mixing=Mixing(batching_method="stratified", global_batch_size=8)
    ),
    "chapters-tokens": _chapters(
        *TWO_MIXTURES,
        mixing=Mixing(weight_unit="tokens", global_batch_size=8),
        order=Order(seed=17, num_lanes=2, pack_shuffle=0),
    ),
    "chapters-per_stream": _chapters(
        *TWO_MIXTURES, mixing=Mixing(batching_method="per_stream", global_batch_size=8)
    ),
    "chapters-device_per_stream": _chapters(
        *TWO_MIXTURES, mixing=Mixing(batching_method="device_per_stream", global_batch_size=8)
    ),
    "chapters-next_fit": _chapters(*TWO_MIXTURES, packing=NEXT_FIT),
    "chapters-concat": _chapters(*TWO_MIXTURES, packing=Packing(max_seq_len=512, method="concat")),
    "chapters-ramps": _chapters(*RAMPS),
    "chapters-ramps-stratified": _chapters(
        *RAMPS, mixing=Mixing(batching_method="stratified", global_batch_size=8)
    ),
    "chapters-lengths": _chapters(
        Chapter(weights={"web": 1, "code": 1}, steps=3),
        Chapter(
            weights={"code": 1, "chat": 1},
            steps=4,
            packing=Packing(max_seq_len=1024, method="next_fit"),
        ),
        Chapter(weights={"web": 1}, batch_size=4, global_batch_size=16),
    ),
    "chapters-end": _chapters(
        Chapter(weights={"web": 1}, steps=7), Chapter(weights={"chat": 1}, passes=12)
    ),
    "chapters-amended": _chapters(*TWO_MIXTURES),
    "chapters-amended-stratified": _chapters(
        *TWO_MIXTURES, mixing=Mixing(batching_method="stratified", global_batch_size=8)
    ),
    "chapters-skipped": _chapters(*TWO_MIXTURES),
    "chapters-edited": _chapters(*RAMPS, packing=NEXT_FIT),
    "online": _online(
        {"web": {"proportion": 0.6}, "code": {"proportion": 0.3}, "chat": {"proportion": 0.1}}
    ),
    "online-shuffled": _online(order=Order(seed=17), mixing=Mixing(weight_unit="tokens")),
    "online-stratified": _online(mixing=Mixing(batching_method="stratified")),
    "online-edges": _online(packing=Packing(max_seq_len=512, method="next_fit", eos_id=1)),
    "online-compact": _online(batch_format="compact"),
    "bucketed": _online(
        bucketing=Bucketing(max_tokens=4096, max_seq_len=1024), order=Order(seed=17)
    ),
}


# Calls on the loader of a case after a number of batches. The world has two ranks, and a global
# batch has two batches of two packs for each of them.
Edits = dict[int, tuple[str, dict[str, Any]]]
EDITS: dict[str, Edits] = {
    "chapters-amended": {6: ("amend", {"weights": {"chat": 1}})},
    "chapters-amended-stratified": {6: ("amend", {"weights": {"web": 1, "chat": 1}})},
    "chapters-skipped": {4: ("skip", {"steps": 3})},
    "chapters-edited": {
        4: ("amend", {"weights": {"web": 0.5, "code": 0.5}}),
        10: ("skip", {"steps": 2}),
        14: ("amend", {"weights": {"chat": 1}}),
    },
}


def batches(
    loader: PackedDataLoader, edits: Edits | None = None, *, done: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the hash and the state of each batch after the first `done`, over several epochs.

    Edits are made after the state is read, so that a loader resumed from it makes them too.
    """
    while done < NUM_BATCHES:
        before = done
        for batch in islice(loader, NUM_BATCHES - done):
            done += 1
            yield digest(batch), loader.state_dict()
            if edits and done in edits:
                method, options = edits[done]
                getattr(loader, method)(**options)
        if done == before:  # a run that ended
            return


def run(case: str, folder: Path) -> dict[str, Any]:
    seen = list(batches(PackedDataLoader(CASES[case](folder)), EDITS.get(case)))
    return {
        "batches": [hashed for hashed, _ in seen],
        "states": {str(number): seen[number - 1][1] for number in SAVED_AT},
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_streams(Path(name))
        found = {case: run(case, Path(name)) for case in CASES}
    lines = (f"{json.dumps(case)}: {json.dumps(found[case])}" for case in found)
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
