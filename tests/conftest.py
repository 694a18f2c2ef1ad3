"""What every test gets: the same generated inputs in every run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Tests share a machine with their own workers and compile kernels at a first call: a deadline per
# example would measure that. Derandomised, so that a red test stays red until it is mended.
settings.register_profile(
    "streampack",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("streampack")

# Files that take longest, mostly with processes of their own. They begin first: one that began last
# would leave the other workers of pytest-xdist without work.
LONGEST = (
    "test_worlds_torchrun.py",
    "test_trainers.py",
    "test_faults_simulation.py",
    "test_examples.py",
    "test_faults_disk.py",
    "test_benchmarks.py",
    "test_faults_hostile.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, in this order; all others stay in theirs."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute in one thread: the models of tests are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
