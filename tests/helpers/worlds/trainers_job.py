"""Two ranks of trainers, connected by gloo and forked from a process that has imported everything.

::

    python trainers_job.py TOLD.json
        told["runs"][i]   an example, its arguments, where to stop
                          --> OUT/<i>-rank<r>.json    digests of what this rank trained on
                              OUT/<i>.pt              rank 0's gradient of the first step

Importing the trainers takes ten times as long as all the runs, so it is done only once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.trainers_seen import load_example, run
from tests.helpers.worlds.torchrun_agents import fork_ranks

NUM_RANKS = 2


def run_rank(rank: int, out: Path, number: int, told: dict[str, Any]) -> None:
    seen = run(told["example"], told["arguments"], stop_after=told["stop_after"])
    (out / f"{number}-rank{rank}.json").write_text(json.dumps(seen.steps))
    if rank == 0:
        torch.save(seen.gradient, out / f"{number}.pt")


def main() -> None:
    """Import what the runs need, then do each in forks."""
    told = json.loads(Path(sys.argv[1]).read_text())
    for each in told["runs"]:
        load_example(each["example"])
    for number, each in enumerate(told["runs"]):
        if any(fork_ranks(run_rank, NUM_RANKS, Path(told["out"]), number, each)):
            sys.exit(f"a rank of run {number} failed")


if __name__ == "__main__":
    main()
