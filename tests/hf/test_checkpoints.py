"""Which checkpoints are complete, and which one a resume uses."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from streampack.errors import ResumeError
from streampack.hf import last_checkpoint
from tests.helpers.fine_tuning import make_dataset, make_samples, make_trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """Return a function that makes a trainer of four steps, which saves every other step."""

    def make(out: str = "out") -> Any:
        return make_trainer(
            tmp_path / out,
            train_dataset=make_dataset(tmp_path / "train", make_samples(60)),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
        )

    make().train()
    return make


def weights(trainer: Any) -> list[float]:
    return next(trainer.model.parameters()).flatten().tolist()


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("trainer_state.json", '{"epoch": 0.5,'),
        ("streampack.json", ""),
        pytest.param("trainer_state.json", "", marks=pytest.mark.slow),
        pytest.param("streampack.json", '{"epoch": 0.5,', marks=pytest.mark.slow),
    ],
)
def test_an_incomplete_checkpoint_is_passed_over_and_said_so(trained, tmp_path, caplog, name, left):
    out = tmp_path / "out"
    expected = weights_after(trained)
    (out / "checkpoint-4" / name).write_text(left)
    assert last_checkpoint(out) == str(out / "checkpoint-2")

    trainer = trained()
    with caplog.at_level(logging.INFO):
        trainer.train(resume_from_checkpoint=True)

    assert "checkpoint-4 is incomplete: resuming from" in caplog.text
    assert trainer.state.global_step == 4
    assert weights(trainer) == expected


def weights_after(trained: Any) -> list[float]:
    trainer = trained("whole")
    trainer.train()
    return weights(trainer)


def test_a_run_resumes_from_any_folder_but_from_no_half_of_one(trained, tmp_path, caplog):
    expected = weights_after(trained)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "out" / "checkpoint-2").rename(elsewhere)
    trainer = trained("second")
    trainer.train(resume_from_checkpoint=str(elsewhere))
    assert weights(trainer) == expected
    elsewhere.rename(tmp_path / "second" / "checkpoint-2")
    (tmp_path / "second" / "checkpoint-4").rename(tmp_path / "third")
    with caplog.at_level(logging.INFO):
        trainer.train(resume_from_checkpoint=str(tmp_path / "second"))
    assert f"resuming from {tmp_path / 'second' / 'checkpoint-2'}" in caplog.text
    assert weights(trainer) == expected

    (tmp_path / "out" / "checkpoint-4" / "streampack.json").unlink()
    with pytest.raises(ResumeError, match=r"no readable streampack.json.*omit resume_from"):
        trained().train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    with pytest.raises(ResumeError, match="has no complete checkpoint; omit it to begin"):
        trained().train(resume_from_checkpoint=True)
    assert last_checkpoint(tmp_path / "out") is None


def test_a_checkpoint_of_this_step_that_is_overwritten_is_incomplete_until_the_end(
    trained, tmp_path
):
    from streampack.hf import checkpoints

    trainer = trained()
    folder = tmp_path / "out" / "checkpoint-2"
    loader = trainer.get_train_dataloader().loader
    checkpoints.save_state(tmp_path / "out", 2, loader, writes=True)
    assert checkpoints.missing_files(folder) == ["trainer_state.json"]


@pytest.mark.usefixtures("trained")
def test_other_files_of_the_folder_are_no_checkpoints(tmp_path):
    shutil.copytree(tmp_path / "out" / "checkpoint-4", tmp_path / "out" / "checkpoint-best")
    assert last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-4")
