"""PackedData: the held-out loss, on one rank and two."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from streampack import Packing, World
from streampack.errors import ConfigError
from streampack.lightning import PackedData
from tests.helpers.bigrams import Bigrams, held_out_loss, loss_one_by_one
from tests.helpers.fine_tuning import make_dataset, make_samples
from tests.helpers.trainers_seen import ROOT
from tests.helpers.worlds.torchrun_agents import PATIENCE_S, environment

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # What Lightning warns of at every start.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]

SIZES = (1, 40, 41)
JOB = ROOT / "tests" / "helpers" / "worlds" / "held_out_job.py"


def samples_of(size: int) -> list[Any]:
    """Held-out samples; one of the 40 has targets, so most batches have none."""
    return make_samples(size, targets=size != 40)


@pytest.mark.parametrize("size", SIZES)
def test_the_held_out_loss_is_that_of_the_samples_one_by_one(tmp_path, size):
    dataset = make_dataset(tmp_path / "data", samples_of(size))
    assert held_out_loss(dataset) == pytest.approx(loss_one_by_one(samples_of(size)), abs=1e-5)


@pytest.mark.processes
def test_two_ranks_measure_what_one_does(tmp_path):
    subprocess.run(
        [sys.executable, JOB, "lightning", tmp_path, *map(str, SIZES)],
        env=environment(),
        timeout=PATIENCE_S,
        check=True,
    )
    for size in SIZES:
        for rank in range(2):
            loss = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
            assert loss == pytest.approx(loss_one_by_one(samples_of(size)), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world": World(num_ranks=2)}, r"num_ranks=2, but Lightning trains on 1; pass World"),
        ({"batch_size": 4}, r"batch_size=2 was asked for, but the dataset was made with batch_"),
    ],
    ids=str,
)
def test_what_is_set_twice_and_differs_is_refused(tmp_path, arguments, message):
    from lightning.pytorch import Trainer

    packing = Packing(max_seq_len=64)
    dataset = make_dataset(tmp_path / "a", make_samples(20), packing=packing, **arguments)
    trainer = Trainer(accelerator="cpu", logger=False, max_steps=1, enable_progress_bar=False)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Bigrams(), datamodule=PackedData(dataset, batch_size=2))
