"""Two ranks evaluate held-out sets, and write their results to files.

::

    python held_out_job.py trainer FOLDER SIZE ...      FOLDER/<size>-<rank>.json: metrics, labels
    python held_out_job.py lightning FOLDER SIZE ...    the loss
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.helpers.bigrams import held_out_loss
from tests.helpers.fine_tuning import make_dataset, make_samples, make_trainer
from tests.helpers.worlds.torchrun_agents import fork_ranks


def labels_of(prediction: Any) -> list[list[int]]:
    return [[label for label in row if label >= 0] for row in prediction.label_ids.tolist()]


def run_rank(rank: int, kind: str, folder: Path, sizes: list[int]) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
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


def main() -> None:
    kind, folder, sizes = sys.argv[1], Path(sys.argv[2]), [int(size) for size in sys.argv[3:]]
    for size in sizes:
        make_dataset(folder / f"data-{size}", make_samples(size, targets=size != 40))
    sys.exit(any(fork_ranks(run_rank, 2, kind, folder, sizes)))


if __name__ == "__main__":
    main()
