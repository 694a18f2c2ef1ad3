"""What every test gets: the same generated inputs in every run."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# torchvision can be imported in this process and in those that tests start: see the module.
SITE = str(Path(__file__).parent / "helpers" / "site")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SITE, os.environ.get("PYTHONPATH"))))
sys.path.append(SITE)
importlib.import_module("torchvision_operators").declare_on_import()
collect_ignore = [
    "helpers/site",
    # Jobs of many processes, some for an environment with peft or trl. They have no doctests, and
    # to look for some would import Lightning and every trainer into each process of pytest-xdist.
    "helpers/worlds",
]

# Tests share a machine with their own workers and compile kernels at a first call: a deadline per
# example would measure that. Derandomised, so that a failing test keeps failing until it is fixed.
# 15 examples: with 8, tests noticed 47 of 52 random changes of a line.
settings.register_profile(
    "streampack",
    deadline=None,
    derandomize=True,
    max_examples=min(int(os.environ.get("STREAMPACK_TEST_EXAMPLES", "15")), 60),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("streampack")

# Python 3.14 starts workers with forkserver where earlier ones fork; so does any Python here, in
# `make forkserver`. A server imports these once; each worker would need two seconds for that.
if start := os.environ.get("STREAMPACK_TEST_START"):
    multiprocessing.set_start_method(start)
multiprocessing.set_forkserver_preload(
    ["streampack.loader.loader", "streampack.online.dataset", "streampack.planned.dataset", "numba"]
)

# Files that take longest, mostly with processes of their own. They begin first: one that began last
# would leave the other workers of pytest-xdist without work.
LONGEST = (
    "test_processes.py",
    "test_rows.py",
    "test_install.py",
    "test_worker_pool.py",
    "test_laws.py",
    "test_chapters.py",
    "test_interrupts.py",
    "test_preemption.py",
    "test_trainers.py",
    "test_token_shards.py",
    "test_left_snapshots.py",
    "test_resume.py",
    "test_interrupt.py",
    "test_disk.py",
    "test_examples.py",
    "test_jobs.py",
    "test_network.py",
    "test_epochs.py",
    "test_files.py",
    "test_tables.py",
    "test_killed_trainers.py",
    "test_worlds_torchrun.py",
    "test_unknown_lengths.py",
    "test_download.py",
    "test_page.py",
    "test_hostile.py",
    "test_small_passes.py",
    "test_benchmarks.py",
    "test_laws_of_formats.py",
    "test_simulation.py",
    "test_nth_call.py",
    "test_fork.py",
    "test_laws_of_options.py",
    "test_system_limits.py",
    "test_trainer.py",
    "test_reading_workers.py",
)


LONG_RUN_S = 120  # of which the slowest files are printed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, in this order; all others stay in theirs."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Keep what was imported so far out of later garbage collections.

    Modules of all tests and their libraries are a million objects: each collection would take half
    a second, in the middle of a test.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the files that took longest: where to look when the tests become slow."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > LONG_RUN_S:
        terminalreporter.section("slowest files")
        for name, duration in seconds.most_common(20):
            terminalreporter.write_line(f"{duration:7.1f} s  {name}")


@pytest.fixture(scope="session", autouse=True)
def quick_writer() -> Iterator[None]:
    """Let MosaicML's writer look for the end of its uploads a hundred times as often.

    It sleeps a whole second while its queue of uploads is not empty, once in every few streams.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "streaming.base.format.base.writer.sleep", lambda seconds: time.sleep(seconds / 100)
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_pool() -> Iterator[None]:
    """Let a process that tokenizes wait ten minutes for tasks: its next start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streampack.texts.pool.IDLE_S", 600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def impatient_torch() -> Iterator[None]:
    """Let torch's DataLoader wait half a second for a worker that does not end, instead of five."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


# What these two need is imported at their use: the process that only starts the test processes
# would wait five seconds for torch and MosaicML's library.


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute in one thread: the models of tests are too small for more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["plain", "mask", "labels"])
def stream(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stream without, and two with a word on which tokens are targets."""
    from tests.helpers.batches import stream_with_targets

    return stream_with_targets(tmp_path_factory.mktemp("stream") / "s", request.param)
