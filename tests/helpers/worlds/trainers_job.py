"""Two ranks of trainers, connected by gloo and forked from a process that has imported everything.

::

    python trainers_job.py TOLD.json
        told["runs"][i]   an example, its arguments, where to stop
                          --> OUT/<i>-rank<r>.json    digests of what this rank trained on
                              OUT/<i>.pt              rank 0's gradient of the first step

Ranks have torchrun's variables in their environment, with a new port for each run. Importing the
trainers takes ten times as long as all the runs, so it is done only once.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.trainers_seen import load_example, run

NUM_RANKS = 2


def run_all(rank: int, told: dict[str, Any]) -> None:
    """Take the part of one rank in all runs."""
    out = Path(told["out"])
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS}
    here |= {"LOCAL_WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1"}
    for number, each in enumerate(told["runs"]):
        here["MASTER_PORT"] = each["port"]
        os.environ.update({key: str(value) for key, value in here.items()})
        seen = run(each["example"], each["arguments"], stop_after=each.get("stop_after"))
        (out / f"{number}-rank{rank}.json").write_text(json.dumps(seen.steps))
        if rank == 0:
            torch.save(seen.gradient, out / f"{number}.pt")
        if dist.is_initialized():  # the run was stopped
            gc.collect()  # frees the model before the process group that it uses
            dist.destroy_process_group()


def main() -> None:
    """Import what the runs need, then become the ranks."""
    told = json.loads(Path(sys.argv[1]).read_text())
    for each in told["runs"]:
        load_example(each["example"])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_all, args=(rank, told)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    ended = connection.wait([rank.sentinel for rank in ranks])
    for rank in ranks:
        if rank.sentinel in ended:
            rank.join()
            if rank.exitcode:  # the other one would wait forever
                for other in ranks:
                    other.terminate()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
