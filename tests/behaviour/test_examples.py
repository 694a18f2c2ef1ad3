"""examples/train_ddp.py under torchrun, with ranks that are killed.

::

    torchrun --max-restarts=3 train_ddp.py      steps 1 ... 6   SIGKILL of a rank
        restarts it                             steps 5 ... 15  what counted is the epoch, exactly

The slow tests start torchrun itself; the other one its agent, in forks of this process.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from streampack import Mixing, PackedStreamingDataset, Packing, Stream, World
from streampack.streams import open_stream
from streampack.testing import assert_exactly_once
from streampack.write import write_stream
from tests.helpers.worlds import consumed
from tests.helpers.worlds.torchrun_agents import (
    PATIENCE_S,
    ROOT,
    agents_of,
    free_port,
    kill,
    torchrun,
)

EXAMPLE = ROOT / "examples" / "train_ddp.py"
STEPS = re.compile(r"^epoch 0 step (\d+) loss (\S+)$", flags=re.MULTILINE)
SAVE_EVERY = 4
GLOBAL_BATCH = 24


def streams_of(out: Path) -> list[Stream]:
    return [Stream(local=str(out / "data" / name)) for name in ("long", "short")]


def lengths_of(out: Path) -> list[np.ndarray]:
    opened = [open_stream(stream, number) for number, stream in enumerate(streams_of(out))]
    return [
        np.concatenate([stream.shard_lengths(shard) for shard in range(stream.num_shards)])
        for stream in opened
    ]


def check_consumed(out: Path, max_seq_len: int = 512) -> None:
    """Check that the counted packs are the epoch, and each step's those of a single process."""
    lines = consumed.counted(out)
    segments = np.array([segment for line in lines for segment in line["segments"]])
    assert_exactly_once([{"segments": segments}], lengths_of(out))
    alone = PackedStreamingDataset(
        streams=streams_of(out),
        packing=Packing(max_seq_len=max_seq_len),
        mixing=Mixing(global_batch_size=GLOBAL_BATCH),
        batch_size=GLOBAL_BATCH,
        world=World(),
    )
    for step, batch in enumerate(alone, 1):
        segments = consumed.segments_of([line for line in lines if line["step"] == step])
        assert sorted(segments.tolist()) == sorted(batch["segments"][:, 1:].tolist())
    assert {line["step"] for line in lines} == set(range(1, step + 1))


def losses_of(log: Path) -> dict[int, set[str]]:
    losses: dict[int, set[str]] = {}
    for step, loss in STEPS.findall(log.read_text()):
        losses.setdefault(int(step), set()).add(loss)
    return losses


def pids_when(job, out: Path, *, run: int, step: int) -> dict[int, int]:
    def ended() -> bool:
        return any(agent.poll() is not None for agent in job.agents)

    return consumed.wait_until(
        lambda: consumed.pids_at_step(out, run, step), ended, timeout_s=PATIENCE_S
    )


def train(log: Path, *arguments: object) -> None:
    """Run the example in a rank that is a fork, so that it need not import torch again."""
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    warnings.simplefilter("ignore")  # in tests they are errors
    sys.argv = [EXAMPLE.name, *map(str, arguments)]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_a_killed_rank_costs_a_restart_and_the_samples_consumed_are_the_epoch_exactly(tmp_path):
    out, log = tmp_path / "out", tmp_path / "log.txt"
    # Instead of the example's own, which takes four times as long; it still makes up `short`.
    rng = np.random.default_rng(0)
    write_stream((rng.integers(1, 1000, n) for n in rng.integers(1, 130, 400)), out / "data/long")
    arguments = (log, "--out", out, "--max-seq-len", 128)
    [agent] = agents_of(train, arguments, num_ranks=2, max_restarts=3)
    agent.start()
    try:
        pids = consumed.wait_until(
            lambda: consumed.pids_at_step(out, 0, SAVE_EVERY + 2),
            lambda: not agent.is_alive(),
            timeout_s=PATIENCE_S,
        )
        kill(pids[1])
        agent.join(PATIENCE_S)
    finally:
        agent.kill()
    assert agent.exitcode == 0, log.read_text()

    runs = consumed.runs_that_trained(out)
    assert len(runs) == 2
    assert consumed.first_step(runs[1]) >= SAVE_EVERY
    assert consumed.first_step(runs[1]) % SAVE_EVERY == 0
    check_consumed(out, max_seq_len=128)
    # A repeated step has the same samples, weights and optimizer, so its loss is the same.
    assert all(len(losses) == 1 for losses in losses_of(log).values())


@pytest.mark.slow
def test_a_killed_job_goes_on_with_another_number_of_ranks(tmp_path):
    out = tmp_path / "out"
    for run, num_ranks in enumerate((2, 3, 1, 4)):
        log = tmp_path / f"log{run}.txt"
        with torchrun(EXAMPLE, ["--out", out], log=log, num_ranks=num_ranks, max_restarts=3) as job:
            if num_ranks == 4:
                job.wait()
                continue
            pids = pids_when(job, out, run=run, step=SAVE_EVERY * (run + 1) + 1)
            for agent in job.agents:
                agent.kill()
            for pid in pids.values():
                kill(pid)

    assert consumed.first_step(consumed.runs_of(out)[0]) == 0
    assert len(consumed.runs_that_trained(out)) == 4
    check_consumed(out)


@pytest.mark.slow
def test_torchrun_goes_on_without_a_node_that_died(tmp_path):
    out, log = tmp_path / "out", tmp_path / "log.txt"
    options = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    with torchrun(
        EXAMPLE,
        ["--out", out],
        log=log,
        num_ranks=4,
        num_nodes=2,
        options=options,
        max_restarts=3,
        variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ) as job:
        pids = pids_when(job, out, run=0, step=SAVE_EVERY + 1)
        first, second = job.agents
        own = children_of(second.pid)  # the first agent hosts the rendezvous store
        assert len(own & set(pids.values())) == 2
        second.kill()
        for pid in own:
            kill(pid)
        second.wait()
        assert first.wait(PATIENCE_S) == 0, job.tail()

    runs = consumed.runs_of(out)
    assert len(list(runs[0].glob("rank*.jsonl"))) == 4
    assert len(list(runs[-1].glob("rank*.jsonl"))) == 2
    check_consumed(out)


def children_of(pid: int) -> set[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for children in threads for child in children.read_text().split()}
