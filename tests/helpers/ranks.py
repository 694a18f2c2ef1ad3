"""Run a function on every rank of a real gloo group, with a forked process for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import start_processes

from streampack.errors import StreampackError

TIMEOUT = timedelta(seconds=60)  # of the default group


def run_rank(
    rank: int,
    folder: Path,
    load: Callable[..., Any],
    num_ranks: int,
    backend: str,
    options: dict[str, Any],
) -> None:
    """Record the result of `load` on one rank, or the error it raises."""
    torch.set_num_threads(
        1
    )  # OpenMP's threads of the parent are not in a fork, which waits for them
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=num_ranks,
        timeout=TIMEOUT,
    )
    try:
        seen = load(rank, folder, **options)
    except StreampackError as error:
        seen = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    # If a rank ended early, collective calls of the others would fail.
    distributed.barrier(None if backend == "gloo" else distributed.new_group(backend="gloo"))
    distributed.destroy_process_group()


def on_ranks(
    folder: Path,
    load: Callable[..., Any],
    num_ranks: int,
    *,
    backend: str = "gloo",
    may_die: bool = False,
    **options: Any,
) -> list[Any]:
    """Return the result of `load(rank, folder, **options)` on each rank, or the error it raises.

    If ranks may die, which gives None, no launcher ends the others.
    """
    (folder / "meeting").unlink(missing_ok=True)
    arguments = (folder, load, num_ranks, backend, options)
    ranks = start_processes(
        run_rank, arguments, nprocs=num_ranks, start_method="fork", join=not may_die
    )
    for process in ranks.processes if may_die else ():
        process.join(TIMEOUT.total_seconds())
        assert process.exitcode is not None, "a rank waits forever"
    files = [folder / f"{rank}.json" for rank in range(num_ranks)]
    return [json.loads(f.read_text()) if f.exists() or not may_die else None for f in files]
