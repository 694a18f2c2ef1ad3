"""The script of every rank of a test's torchrun job: iterate as configured, and log the batches.

::

    torchrun torchrun_job.py TOLD.json
        told["runs"][i] --> a dataset and a loader in the world given by torchrun's variables
                        --> OUT/<run>-rank<r>.json    digests of every pack, state and step

Either rank 0 alone saves a state with torch.save and every rank loads it, or all of them save and
load with torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from streampack.batch.slices import merge_slices
from streampack.config import Mixing, Order, Packing
from streampack.loader.loader import PackedDataLoader
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import Stream
from streampack.world import World
from tests.helpers.conformance import rows

GLOBAL_BATCH = 24
NUM_LANES = 4
MAX_SEQ_LEN = 64


def make(streams: list[dict[str, Any]], world: World | None, **options: Any) -> Any:
    """The dataset of these tests; by default, its world comes from the environment."""
    return PackedStreamingDataset(
        streams=[Stream(**stream) for stream in streams],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        mixing=Mixing(global_batch_size=GLOBAL_BATCH, **options.pop("mixing", {})),
        order=Order(seed=3, num_lanes=NUM_LANES),
        world=world,
        **{"batch_size": 2, **options},
    )


def digest_of(pack: tuple[bytes, ...]) -> str:
    return blake2b(b"|".join(pack), digest_size=8).hexdigest()


def bare(state: dict[str, Any]) -> str:
    """A state as text, without the snapshots of a rank's lanes and the history of worlds."""
    return json.dumps({**state, "snapshots": [], "worlds": ""}, sort_keys=True)


class App:
    """A loader and other parts of a training, which torch.distributed.checkpoint saves together."""

    def __init__(self, loader: PackedDataLoader) -> None:
        self.loader = loader
        self.weight = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "loader": self.loader.state_dict()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self.weight = states["weight"]
        self.loader.load_state_dict(states["loader"])


def load(told: dict[str, Any], loader: PackedDataLoader) -> None:
    if "load" in told:
        loader.load_state_dict(torch.load(told["load"], weights_only=True)["loader"])
    if "load_dcp" in told:
        app = App(loader)
        dcp.load({"app": app}, checkpoint_id=told["load_dcp"])
        if app.weight.tolist() != [1, 2, 3]:
            raise ValueError(f"the checkpoint's tensor came back as {app.weight.tolist()}")


def save(told: dict[str, Any], loader: PackedDataLoader) -> None:
    if "save" in told and dist.get_rank() == 0:
        torch.save({"loader": loader.state_dict()}, told["save"])
    if "save_dcp" in told:
        app = App(loader)
        app.weight = torch.tensor([1.0, 2.0, 3.0])
        dcp.save({"app": app}, checkpoint_id=told["save_dcp"])


def whole(batch: dict[str, Any], world: World) -> dict[str, Any]:
    if world.context_parallel == 1:
        return batch
    sent: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(sent, (world.place, batch))
    return merge_slices([slice_ for place, slice_ in sent if place == world.place])


def run(told: dict[str, Any], streams: list[dict[str, Any]]) -> dict[str, Any]:
    world = None
    if "replication" in told:
        shared = {key: told[key] for key in ("replication", "context_parallel") if key in told}
        world = World.from_env(os.environ, **shared)
    dataset = make(streams, world)
    loader = PackedDataLoader(dataset)
    load(told, loader)
    start, length = loader.state_dict(), len(dataset)
    steps = []
    for batch in loader:
        state = loader.state_dict()
        if batch["epoch"] != start["epoch"]:
            raise ValueError(f"a batch of epoch {batch['epoch']} in epoch {start['epoch']}")
        if state != json.loads(json.dumps(state)):
            raise ValueError("the state is not the same once it was JSON")
        packs = [digest_of(pack) for pack in rows(whole(batch, dataset.world))]
        steps.append({"position": batch["position"], "packs": packs, "state": bare(state)})
        if len(steps) == told.get("save_after"):
            save(told, loader)
        if len(steps) == told.get("stop_after"):
            break
    world = dataset.world
    return {
        "rank": world.rank,
        "node": world.node,
        "place": world.place,
        "num_devices": world.num_devices,
        "length": length,
        "start": start["position"],
        "steps": steps,
    }


def main(path: str) -> None:
    told = json.loads(Path(path).read_text())
    dist.init_process_group("gloo")
    # Every node caches its shards in a separate folder, as if each had its own disk.
    streams = [
        {**stream, "local": stream["local"].format(node=os.environ["GROUP_RANK"])}
        for stream in told["streams"]
    ]
    for each in told["runs"]:
        seen = run(each, streams)
        name = f"{each['name']}-rank{dist.get_rank()}.json"
        (Path(told["out"]) / name).write_text(json.dumps(seen))
        # Do not load a state before it is written.
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
