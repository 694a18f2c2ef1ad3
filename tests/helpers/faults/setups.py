"""Shared by all simulated schedules: small data sets, their unbroken runs, and a rank's planner.

::

    write shards --> the store's files, the whole shards
                 '-> unbroken run: the rows of every slot, each compared with what was written
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streampack import Download
from streampack.config import Mixing, Order, Packing
from streampack.gather.gather import Gatherer
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.plan.state import Progress, RunShape
from streampack.planned.build import build_recipe
from streampack.planned.cache_budget import cache_needs
from streampack.planned.spec import DatasetSpec
from streampack.storage.materialize import Downloader
from streampack.streams import Stream, TokenStream, open_streams
from streampack.types import LENGTH, SAMPLE, START, STREAM, TOTAL, Int64Array
from streampack.world import World
from tests.helpers import builders
from tests.helpers.faults.memorydisk import MemoryDisk, Waits
from tests.helpers.planning import epoch_sequence

SEQ_LEN = 16
GLOBAL_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """A data set, its packing, and the rows of its unbroken run."""

    files: dict[str, bytes]
    """The objects in the store, by stream and basename."""
    shards: dict[str, bytes]
    """The expected contents of each final name in a cache, by stream and basename."""
    opened: tuple[TokenStream, ...]
    recipe: Recipe
    keep_zip: bool
    tokens: list[Int64Array]
    """The rows of all slots of epochs 0 and 1, shape (num_slots, max_seq_len) each."""
    num_packs: list[int]
    """How many slots of each epoch contain packs; the others are padding."""
    limits: dict[tuple[World, int, int], int] = field(default_factory=dict)

    @property
    def num_streams(self) -> int:
        return len(self.opened)

    @property
    def is_large(self) -> bool:
        """Whether a node's cache is too small for all of it under a limit."""
        return sum(stream.num_shards for stream in self.opened) > 12

    @property
    def shard_bytes(self) -> int:
        """The largest shard, packed and raw."""
        return max(
            shard.raw.num_bytes + (shard.packed.num_bytes if shard.packed else 0)
            for stream in self.opened
            for shard in stream.shards.index.shards
        )

    def blueprint(self, streams: tuple[TokenStream, ...], world: World, batch_size: int) -> Any:
        recipe = self.recipe
        return DatasetSpec(
            streams=streams,
            packing=recipe.packing,
            mixing=recipe.mixing,
            order=recipe.order,
            batch_size=batch_size,
            world=world,
        )

    def shape(self) -> tuple[int, int, int]:
        return self.recipe.num_lanes, self.recipe.lane_turn, self.recipe.global_batch_size

    def recipe_for(self, streams: tuple[TokenStream, ...]) -> Recipe:
        """Return the recipe of a process, which reads lengths from shards if it has no length file.

        It fetches them one by one, since the simulation has no threads.
        """
        if all(stream.shards.has_lengths for stream in streams):
            return self.recipe
        recipe = build_recipe(self.blueprint(streams, World(), 1), RunShape(*self.shape()))
        return replace(
            recipe,
            streams=tuple(
                replace(own, prepare=lambda shards, s=stream: [s.fetch(i) for i in shards.tolist()])
                for own, stream in zip(recipe.streams, streams, strict=True)
            ),
        )

    def limit_for(self, world: World, batch: int, extra: int) -> int:
        key = (world, batch, extra)
        if key not in self.limits:
            disk = MemoryDisk()
            store = Downloader(fetch=partial(self._copy, disk), fetch_if_there=lambda *_: False)
            streams = open_remote(self, Path("/any"), disk, store, None)
            needs = cache_needs(self.blueprint(streams, world, batch), self.recipe)
            readers = world.num_local_ranks * (1 + extra)
            self.limits[key] = (needs.node_bytes + readers * needs.shard_bytes) // 2
        return self.limits[key]

    def object_at(self, uri: str) -> bytes:
        return self.files[uri.removeprefix("s3://store/")]

    def _copy(
        self, disk: MemoryDisk, files: Any, basename: str, to: Path, *, check: Any, **_: Any
    ) -> None:
        disk.write(to, [self.object_at(f"{files.remote}/{basename}")])
        check(to)


VARIANTS: list[dict[str, Any]] = [
    {"mixing": Mixing(), "compression": None},
    {
        "mixing": Mixing(epoch_end="carry"),
        "compression": "zstd",
        "num_lanes": 2,
        "num_streams": 2,
    },
    {
        "mixing": Mixing(batching_method="stratified"),
        "compression": None,
        "lengths_file": False,
        "num_streams": 2,
    },
    {
        "mixing": Mixing(),
        "compression": "gz",
        "lengths_file": False,
        "keep_zip": True,
        "num_streams": 2,
    },
    {
        "mixing": Mixing(epoch_end="carry", batching_method="per_stream", weight_unit="tokens"),
        "compression": "zstd",
        "num_lanes": 2,
        "keep_zip": True,
    },
    # Many shards, so that even a workable cache limit is smaller than all of them.
    {"mixing": Mixing(), "compression": None, "num_samples": 36, "longest": 12, "shard": 280},
]


def make_setups(folder: Path) -> list[Setup]:
    return [_make_setup(folder / str(i), i, **variant) for i, variant in enumerate(VARIANTS)]


def _make_setup(
    folder: Path,
    number: int,
    *,
    mixing: Mixing,
    compression: str | None,
    num_lanes: int = 1,
    lengths_file: bool = True,
    keep_zip: bool = False,
    num_streams: int = 1,
    num_samples: int = 12,
    longest: int = 33,
    shard: int = 560,
) -> Setup:
    rng = random.Random(number)
    all_lengths = [
        [rng.randint(1, longest) for _ in range(num_samples)] for _ in range(num_streams)
    ]
    for stream, lengths in enumerate(all_lengths):
        builders.write_stream_files(
            folder / str(stream),
            lengths,
            seed=stream,
            compression=compression,
            hashes=["xxh64"],
            size_limit=shard,
            lengths_file=lengths_file,
        )
    files = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lengths.bin"
    }
    opened = open_streams([Stream(local=str(folder / str(i))) for i in range(len(all_lengths))])
    shards = dict(files)
    for stream in opened:
        for shard in range(stream.num_shards):
            name = f"{stream.name}/{stream.shards.index.shards[shard].raw.basename}"
            shards[name] = stream.open_shard(shard).data.tobytes()
    blueprint = DatasetSpec(
        streams=opened,
        packing=Packing(max_seq_len=SEQ_LEN, buffer_tokens=3 * SEQ_LEN, buffer_samples=6),
        mixing=mixing,
        order=Order(seed=number, shuffle_block_size=5),
        batch_size=1,
        world=World(),
    )
    recipe = build_recipe(blueprint, RunShape(num_lanes, 2, GLOBAL_BATCH))
    tokens, num_packs = zip(
        *(_unbroken(recipe, opened, epoch, all_lengths) for epoch in range(2)), strict=True
    )
    return Setup(
        files=files,
        shards=shards,
        opened=opened,
        recipe=recipe,
        keep_zip=keep_zip,
        tokens=list(tokens),
        num_packs=list(num_packs),
    )


def _unbroken(
    recipe: Recipe, streams: tuple[TokenStream, ...], epoch: int, lengths: list[list[int]]
) -> tuple[Int64Array, int]:
    """Run an epoch without faults, compare it with what was written, and return its rows."""
    sequence = epoch_sequence(recipe, DeviceView(), Progress(epoch=epoch))
    gatherer = Gatherer(streams, recipe.packing)
    rows, left = [], [np.array(of_stream) for of_stream in lengths]
    num_packs = 0
    while (plan := sequence.next()) is not None:
        row = gatherer.gather(plan.packs, 1).tokens[0]
        num_packs += len(plan.packs)
        at = 0
        for segment in plan.packs.segments:
            number, sample, total = (int(segment[c]) for c in (STREAM, SAMPLE, TOTAL))
            start, stop = int(segment[START]), int(segment[START] + segment[LENGTH])
            truth = builders.tokens_of(number, sample, total)[start:stop]
            assert row[at : at + stop - start].tolist() == truth.tolist()
            at += stop - start
            left[number][sample] -= stop - start
        rows.append(row)
    sequence.close()
    if recipe.mixing.epoch_end == "pad":
        assert not any(each.any() for each in left), "a sample is missing or comes twice"
    return np.stack(rows), num_packs


def open_remote(
    setup: Setup, folder: Path, disk: MemoryDisk, store: Downloader, limit: int | None
) -> tuple[TokenStream, ...]:
    """Open a setup's streams from the store, with the length files that are on the real disk."""
    streams = [
        Stream(
            remote=f"s3://store/{i}",
            local=str(folder / str(i)),
            download=Download(keep_zip=setup.keep_zip),
        )
        for i in range(setup.num_streams)
    ]
    opened = open_streams(streams, cache_limit=limit, disk=disk, store=store)
    return tuple(
        replace(stream, shards=replace(stream.shards, length_file=local.shards.length_file))
        for stream, local in zip(opened, setup.opened, strict=True)
    )


class Planner:
    """The sequence of a rank, which is replanned if a plan has to wait for a shard."""

    def __init__(self, recipe: Recipe, view: DeviceView, start: Progress) -> None:
        self._recipe = recipe
        self._view = view
        self._at = start
        self._sequence: PackSequence | None = None

    def next(self) -> Any:
        """Return a plan, its slot, changed needs for shards, and snapshots; None at the end."""
        at, self._at = self._at, Progress()
        sequence, self._sequence = self._sequence, None
        try:
            if sequence is None:
                sequence = epoch_sequence(self._recipe, self._view, at)
            slot = sequence.position
            plan = sequence.next()
            if plan is None:
                self._sequence = sequence
                return None
            needs, snapshots = sequence.shards_ahead(), sequence.snapshots()
        except Waits:
            self._at = at
            raise
        self._sequence = sequence
        self._at = Progress(epoch=at.epoch, position=sequence.position, snapshots=snapshots)
        return plan, slot, needs, snapshots

    def close(self) -> None:
        if self._sequence is not None:
            self._sequence.close()
