"""PackedData: the held-out loss, on one rank and two."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.bigrams import held_out_loss, loss_one_by_one
from tests.helpers.fine_tuning import make_dataset, make_samples
from tests.helpers.worlds.torchrun_agents import run_job

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # What Lightning warns of at every start.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]

SIZES = (1, 40, 41)


def samples_of(size: int) -> list[Any]:
    """Held-out samples; one of the 40 has targets, so most batches have none."""
    return make_samples(size, targets=size != 40)


@pytest.mark.parametrize("size", SIZES)
def test_the_held_out_loss_is_that_of_the_samples_one_by_one(tmp_path, size):
    dataset = make_dataset(tmp_path / "data", samples_of(size))
    assert held_out_loss(dataset) == pytest.approx(loss_one_by_one(samples_of(size)), abs=1e-5)


@pytest.mark.processes
def test_two_ranks_measure_what_one_does(tmp_path):
    run_job("held_out_job.py", "lightning", tmp_path, *SIZES)
    for size in SIZES:
        for rank in range(2):
            loss = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
            assert loss == pytest.approx(loss_one_by_one(samples_of(size)), abs=1e-5)
