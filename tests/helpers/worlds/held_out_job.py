"""Two ranks evaluate held-out sets, and write their results to files.

::

    python held_out_job.py trainer FOLDER SIZE ...      FOLDER/<size>-<rank>.json: metrics, labels
    python held_out_job.py lightning FOLDER SIZE ...    the loss
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.bigrams import held_out_loss
from tests.helpers.fine_tuning import make_dataset, make_samples, make_trainer
from tests.helpers.worlds.torchrun_agents import free_port


def labels_of(prediction: Any) -> list[list[int]]:
    """The labels of each row, without the ignored ones."""
    return [[label for label in row if label >= 0] for row in prediction.label_ids.tolist()]


def run_rank(rank: int, kind: str, folder: Path, sizes: list[int], port: int) -> None:
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    here |= {
        "NODE_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    os.environ.update({key: str(value) for key, value in here.items()})
    for size in sizes:
        dataset = make_dataset(folder / f"data-{size}", make_samples(size, targets=size != 40))
        seen: Any
        if kind == "trainer":
            trainer = make_trainer(folder / "out")
            seen = {"metrics": trainer.evaluate(dataset)}
            seen["labels"] = labels_of(trainer.predict(dataset))
        else:
            seen = held_out_loss(dataset, devices=2, strategy="ddp")
        (folder / f"{size}-{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # gloo's threads can keep a process from exiting


def main() -> None:
    kind, folder, sizes = sys.argv[1], Path(sys.argv[2]), [int(size) for size in sys.argv[3:]]
    for size in sizes:
        make_dataset(folder / f"data-{size}", make_samples(size, targets=size != 40))
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=run_rank, args=(rank, kind, folder, sizes, port))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
