"""Killed processes: the rank reports within 10 s, and a restart needs no manual step.

A kill is triggered by a batch in the job's log or by a request at the store, never by a clock.

Cost: a job about a second, most of it in an epoch of 76 batches; two or three jobs a test.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.faults.launch import Bench, outcome, wait_for_end

NUM_QUICK, NUM_ALL = 1, 50
RAISES_WITHIN_S = 30  # on a busy machine, too
LAST_KILL = 40  # of 76 batches; later, a worker may already have finished

# Without workers, the same process fetches; a third shard is fetched as the first is.
SLOW_KILLS = [pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 0), (0, 3), (2, 3))]
POINTS = [
    pytest.param(point, marks=[pytest.mark.slow] if point >= NUM_QUICK else [])
    for point in range(NUM_ALL)
]


@pytest.fixture
def near(bench: Bench) -> Bench:
    """A bench that fetches from a folder, which is quicker for tests that need no network."""
    bench.options = {"streams": bench.streams(s3=False)}
    return bench


def check_names_the_worker(folder: Path, pid: int, killed_at_s: float) -> None:
    """Check that a job ended with a `WorkerError` about this process, soon after the kill."""
    told = outcome(folder)
    assert told["outcome"] == "WorkerError", told
    assert str(pid) in told["message"]
    assert told["at_s"] - killed_at_s <= RAISES_WITHIN_S


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_worker_is_named_within_10_s_and_the_run_goes_on_from_its_last_state(near, point):
    """Hold proc_worker_kill_1rank."""
    chance = random.Random(point)
    config = near.config(loader={"num_workers": 2})
    job = near.jobs.start_and_take(config, chance.randint(1, LAST_KILL))
    worker = chance.choice(job.workers())
    killed_at_s = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    wait_for_end([worker], 60)  # the job may need no more than what is at hand
    job.go_on()
    assert job.join() == 3, job.errors()
    check_names_the_worker(job.folder, worker, killed_at_s)

    again = {**config, "state": "last", "loader": {"num_workers": chance.choice([0, 1, 2])}}
    assert near.jobs.run(again).status == 0
    near.check_exact(config)
    near.check_as_unbroken(config)
    near.check_clean(config)


def test_a_worker_killed_before_its_first_batch_is_named_too(bench):
    stall = bench.server.add("stall_body", path="shard")
    config = bench.config(loader={"num_workers": 2})
    job = bench.jobs.start(config)
    # Workers start before the first plan is requested, and shards are fetched for that plan.
    bench.server.wait_for(stall)
    workers = job.workers()
    killed_at_s = time.monotonic()
    os.kill(workers[0], signal.SIGKILL)
    assert job.join() == 3, job.errors()
    check_names_the_worker(job.folder, workers[0], killed_at_s)


def two_ranks(bench: Bench, **options: object) -> list[dict]:
    """The configs of two ranks on one node, with a shared cache."""
    return [
        bench.config(f"rank{rank}", world={"rank": rank, "num_ranks": 2}, **options)
        for rank in range(2)
    ]


def test_a_killed_worker_of_one_rank_stops_that_rank_alone(near):
    """Hold proc_worker_kill_2ranks."""
    configs = two_ranks(near, loader={"num_workers": 2})
    ranks = [near.jobs.start(configs[0]), near.jobs.start_and_take(configs[1], 7)]
    worker = ranks[1].workers()[0]
    killed_at_s = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    wait_for_end([worker], 60)  # the job may need no more than what is at hand
    ranks[1].go_on()
    assert ranks[1].join() == 3, ranks[1].errors()
    check_names_the_worker(ranks[1].folder, worker, killed_at_s)
    assert ranks[0].join() == 0, ranks[0].errors()

    assert near.jobs.run({**configs[1], "state": "last"}).status == 0
    near.check_exact(*configs)
    near.check_clean(*configs)


def test_a_rank_goes_on_into_the_next_epoch_when_its_peer_was_killed(near):
    """Hold proc_rank_kill_peer_next_epoch."""
    configs = two_ranks(near, num_epochs=2, loader={"num_workers": 1})
    ranks = [near.jobs.start(configs[0]), near.jobs.start_and_take(configs[1], 5)]
    assert ranks[1].kill() == -signal.SIGKILL
    assert ranks[0].join() == 0, ranks[0].errors()

    # Both resume from the state saved when the peer died, as they would after a full restart.
    assert near.jobs.run({**configs[1], "state": "last", "num_epochs": 2}).status == 0
    near.check_exact(*configs, num_epochs=2)


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_job_starts_again_at_once_and_its_epoch_is_exact(near, point):
    """Hold proc_restart_after_group."""
    chance = random.Random(1000 + point)
    config = near.config(loader={"num_workers": chance.choice([0, 2])})
    num_kills = chance.randint(1, 3)
    for number in range(num_kills):
        job = near.jobs.start_and_take({**config, "state": "last"}, chance.randint(0, 20))
        assert job.kill() == -signal.SIGKILL, f"kill {number}: {job.errors()}"
    job = near.jobs.run({**config, "state": "last"})
    assert job.status == 0, job.errors()
    near.check_exact(config)
    near.check_as_unbroken(config)
    near.check_clean(config)


@pytest.mark.parametrize(("num_workers", "skip"), [(2, 0), *SLOW_KILLS])
def test_a_job_killed_in_mid_download_never_reads_half_a_shard(bench, num_workers, skip):
    """Hold proc_kill_mid_download_restart."""
    stall = bench.server.add("stall_body", path="shard", skip=skip)
    config = bench.config(loader={"num_workers": num_workers})
    job = bench.jobs.start(config)
    bench.server.wait_for(stall)
    assert job.kill() == -signal.SIGKILL
    bench.server.clear()

    job = bench.jobs.run({**config, "state": "last"})
    assert job.status == 0, job.errors()
    bench.check_exact(config)
    bench.check_as_unbroken(config)
    bench.check_clean(config)


# The signal, and whether only the trainer gets it, its whole group, or each process in turn.
ENDS = {
    "proc_restart_after_main": (signal.SIGKILL, "main"),
    "proc_restart_after_cgroup": (signal.SIGKILL, "each"),
    "proc_restart_after_int": (signal.SIGINT, "main"),
    "int_of_the_group": (signal.SIGINT, "group"),
    "proc_restart_after_term": (signal.SIGTERM, "main"),
    "term_of_the_group": (signal.SIGTERM, "group"),
}
# `job.kill` of the tests above ends a job as a control group does.
SLOW_ENDS = ["proc_restart_after_cgroup", *list(ENDS)[3:]]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW_ENDS)) for row in ENDS]
)
def test_a_job_that_was_ended_starts_again_at_once_and_its_workers_end(near, row):
    number, whom = ENDS[row]
    config = near.config(loader={"num_workers": 2})
    job = near.jobs.start_and_take(config, 10)
    workers = job.workers()
    if whom == "group":
        job.kill(number)
    for pid in {"main": [job.pid], "each": [job.pid, *workers]}.get(whom, []):
        os.kill(pid, number)
    job.join()
    assert job.status == -number if number == signal.SIGKILL else job.status != 0
    assert near.jobs.run({**config, "state": "last"}).status == 0
    near.check_exact(config)
    near.check_as_unbroken(config)
    wait_for_end(workers, 60)
    near.check_clean(config)
