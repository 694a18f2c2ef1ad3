"""The code of the pages of Megatron-LM and torchtitan, on ranks with pipelines of theirs.

::

    pp 2, dp 2, tp 2 --> the page's loader in every rank --> FOLDER/<trainer>/<rank>.json
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch.testing._internal.distributed.fake_pg  # noqa: F401 - torchtitan's for sizes of 1
from megatron.core import parallel_state
from torchtitan.distributed import ParallelDims

from streampack import ConfigError, PackedDataLoader, PackedStreamingDataset, Packing, Stream, World
from streampack.write import write_stream
from tests.helpers.ranks import on_ranks
from tests.helpers.worlds.torchrun_agents import ROOT

SIZES = {"pp": 2, "dp": 2, "tp": 2}
BATCHES = 3


def code_of(page: str) -> dict[str, Any]:
    text = (ROOT / "docs" / "trainers" / f"{page}.md").read_text()
    names: dict[str, Any] = {"__name__": page}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, names)
    return names


def refusal(folder: Path) -> str:
    """How replication is refused where the trainer has pipelines."""
    world = World.from_env({}, replication=4)
    stream = Stream(local=folder / "data" / "text")
    dataset = PackedStreamingDataset([stream], packing=Packing(max_seq_len=64), world=world)
    try:
        next(iter(PackedDataLoader(dataset)))
    except ConfigError as error:
        return str(error)
    return ""


def megatron(_: int, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=SIZES["tp"], pipeline_model_parallel_size=SIZES["pp"]
    )
    refused = refusal(folder)
    provider = code_of("megatron")["train_valid_test_datasets_provider"]
    (train, *_), (resumed, *_) = provider((100, 0, 0)), provider((100, 0, 0))
    seen: dict[str, Any] = {"refused": refused, "dp": parallel_state.get_data_parallel_rank()}
    if train is None:
        return seen
    seen["rows"] = [batch["tokens"].tolist() for batch in islice(train, BATCHES)]
    state = train.save_state()
    seen["next"] = next(train)["tokens"].tolist()
    resumed.loader.load_state_dict(state)
    return seen | {"resumed": next(resumed)["tokens"].tolist()}


def torchtitan(_: int, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    sizes = {"dp_replicate": 1, "dp_shard": SIZES["dp"], "cp": 1, "tp": 2, "pp": 2, "ep": 1}
    dims = ParallelDims(**sizes, world_size=8)
    dims.build_mesh()
    refused = refusal(folder)
    mesh = dims.get_mesh("batch")
    config = code_of("torchtitan")["PackedLoader"].Config(dataset_path="data/text")
    options = {"dp_world_size": mesh.size(), "dp_rank": mesh.get_local_rank(), "seq_len": 64}
    options |= {"local_batch_size": 2, "tokenizer": None, "snapshot_every_n_steps": None}
    loader, resumed = config.build(**options), config.build(**options)
    batches = iter(loader)
    rows = [inputs["input"].tolist() for inputs, _ in islice(batches, BATCHES)]
    resumed.load_state_dict(loader.state_dict())
    return {
        "refused": refused,
        "dp": mesh.get_local_rank(),
        "rows": rows,
        "next": next(batches)[0]["input"].tolist(),
        "resumed": next(iter(resumed))[0]["input"].tolist(),
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    seen = {}
    for job in (megatron, torchtitan):
        folder = out / job.__name__
        samples = [[i % 500 + 1] * (i % 37 + 4) for i in range(400)]
        write_stream(samples, folder / "data" / "text")
        seen[job.__name__] = on_ranks(folder, job, 8)
    (out / "seen.json").write_text(json.dumps(seen))
