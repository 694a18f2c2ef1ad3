"""PackedTrainer: the arguments it fills in, its metrics, and its refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    EarlyStoppingCallback,
    Trainer,
)
from transformers.modeling_outputs import CausalLMOutput

from streampack import (
    IterableStream,
    Mixing,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.errors import ConfigError
from streampack.hf import PackedTrainerMixin
from streampack.runtime.provenance import RECENT
from streampack.write import write_stream
from tests.helpers.fine_tuning import (
    MAX_SEQ_LEN,
    make_dataset,
    make_model,
    make_samples,
    make_trainer,
    unpacked_loss,
)
from tests.helpers.worlds.torchrun_agents import run_job

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (1, 40, 41)


def held_out(folder: Path, size: int, **arguments: Any) -> tuple[Any, list[Any]]:
    """A held-out set; with 40 samples, only one has targets, so most batches have none."""
    samples = make_samples(size, targets=size != 40)
    return make_dataset(folder / f"data-{size}", samples, **arguments), samples


def labels_wanted(samples: list[Any]) -> list[list[int]]:
    """The expected targets of each sample, in order."""
    return [
        [int(t) for t, m in zip(s["tokens"][1:], s["loss_mask"][1:], strict=True) if m]
        for s in samples
    ]


# Evaluation.


@pytest.mark.parametrize("size", SIZES)
def test_the_held_out_loss_is_that_of_the_unpacked_loop(tmp_path, size):
    dataset, samples = held_out(tmp_path, size)
    trainer = make_trainer(tmp_path / "out", eval_dataset=dataset)

    metrics = trainer.evaluate()

    assert metrics["eval_loss"] == pytest.approx(unpacked_loss(trainer.model, samples), abs=1e-5)
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]
    assert metrics["eval_samples_per_second"] * metrics["eval_runtime"] == pytest.approx(
        size, rel=0.02
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"mixing": Mixing(epoch_end="carry", global_batch_size=4), "batch_size": 2},
        {"mixing": Mixing(epoch_end="drop"), "batch_format": "hf"},
    ],
    ids=str,
)
def test_a_held_out_set_is_whole_however_its_epochs_end(tmp_path, arguments):
    dataset, samples = held_out(tmp_path, 41, **arguments)
    trainer = make_trainer(tmp_path / "out")
    measured = trainer.evaluate({"a": dataset})["eval_a_loss"]
    assert measured == pytest.approx(unpacked_loss(trainer.model, samples), abs=1e-5)


@pytest.mark.processes
def test_two_ranks_measure_what_one_does_and_predict_in_order(tmp_path):
    run_job("held_out_job.py", "trainer", tmp_path, *SIZES)
    model = make_model()
    for size in SIZES:
        samples = make_samples(size, targets=size != 40)
        for rank in range(2):
            seen = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
            loss = seen["metrics"]["eval_loss"]
            assert loss == pytest.approx(unpacked_loss(model, samples), abs=1e-5)
            assert seen["labels"] == labels_wanted(samples)


def test_metrics_see_one_sample_a_row_in_order(tmp_path):
    dataset, samples = held_out(tmp_path, 41)
    seen = []
    trainer = make_trainer(
        tmp_path / "out",
        eval_dataset=dataset,
        compute_metrics=lambda each: seen.append(each) or {"rows": len(each.label_ids)},
    )

    metrics = trainer.evaluate()

    assert metrics["eval_rows"] == 41
    assert metrics["eval_loss"] == pytest.approx(unpacked_loss(trainer.model, samples), abs=1e-5)
    (prediction,) = seen
    for row, sample in enumerate(samples):
        ids = torch.tensor(sample["tokens"])[None].long()
        with torch.no_grad():
            alone = trainer.model(input_ids=ids).logits[0].numpy()
        np.testing.assert_allclose(prediction.predictions[row, : ids.shape[1]], alone, atol=1e-4)
    predicted = trainer.predict(dataset)
    assert predicted.predictions.shape == prediction.predictions.shape


def test_a_sample_that_packs_cut_is_one_row(tmp_path):
    write_stream([range(1, 31), range(1, 8)], tmp_path / "a")
    dataset = PackedStreamingDataset(
        [Stream(local=str(tmp_path / "a"))], packing=Packing(max_seq_len=8, overflow="split")
    )
    labels = make_trainer(tmp_path / "out").predict(dataset).label_ids
    assert labels[0].tolist() == [-100, *range(2, 31)]
    assert labels[1].tolist() == [-100, *range(2, 8)] + [-100] * 23


def test_a_dataset_that_is_not_ours_takes_trainers_own_path(tmp_path):
    dataset, _ = held_out(tmp_path, 41)
    rows = [
        {"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)},
        {"input_ids": torch.arange(2, 10), "labels": torch.arange(2, 10)},
    ]
    trainer = make_trainer(tmp_path / "out", eval_dataset=dataset)
    plain = make_trainer(tmp_path / "out", cls=Trainer, train_dataset=rows, max_steps=2)

    assert trainer.evaluate(rows)["eval_loss"] == plain.evaluate(rows)["eval_loss"]
    assert trainer.evaluate()["eval_loss"] != trainer.evaluate(rows)["eval_loss"]
    ours = make_trainer(tmp_path / "out", train_dataset=rows, max_steps=2)
    assert ours.train().training_loss == plain.train().training_loss


def test_training_stops_early_and_the_best_model_is_loaded(tmp_path):
    dataset, _ = held_out(tmp_path, 41)
    trainer = make_trainer(
        tmp_path / "out",
        train_dataset=make_dataset(tmp_path / "train", make_samples(60, 1)),
        eval_dataset=dataset,
        num_train_epochs=20,
        learning_rate=0.0,  # so that the metric never improves
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    assert trainer.state.epoch == 3
    assert trainer.state.best_model_checkpoint is not None


# Arguments that are filled in.


def steps_of_epochs(dataset: Any, number: int) -> list[int]:
    lengths = []
    for epoch in range(number):
        dataset.set_epoch(epoch)
        lengths.append(len(dataset) // 2)
    return lengths


@pytest.mark.parametrize("epochs", [3, 1.5])
def test_epochs_are_those_of_the_plan(tmp_path, epochs):
    samples = make_samples(60, 1)
    trainer = make_trainer(
        tmp_path / "out",
        train_dataset=make_dataset(tmp_path / "train", samples),
        num_train_epochs=epochs,
        gradient_accumulation_steps=2,
        logging_steps=1,
    )
    trainer.train()

    filled = make_dataset(
        tmp_path / "train", samples, batch_size=2, mixing=Mixing(global_batch_size=4)
    )
    steps = steps_of_epochs(filled, 3)
    wanted = sum(steps) if epochs == 3 else steps[0] + -(-steps[1] // 2)
    assert trainer.state.global_step == wanted
    ends = [each["epoch"] for each in trainer.state.log_history if "loss" in each]
    assert ends[steps[0] - 1] == 1
    assert trainer.args.max_steps == -1, "the user's arguments are as they were"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 4}, r"batch_size=2 .* batch_size=4.*per_device_train_batch_size=2"),
        (
            {"mixing": Mixing(global_batch_size=8)},
            r"global_batch_size=4 .*global_batch_size=8.*gradient_accumulation_steps=2",
        ),
        (
            {"world": World(rank=0, num_ranks=2), "mixing": Mixing(global_batch_size=8)},
            r"num_ranks=2, but Trainer trains on 1.*use_cpu=True",
        ),
    ],
    ids=str,
)
def test_what_is_set_twice_and_differs_is_refused(tmp_path, arguments, message):
    dataset = make_dataset(tmp_path / "a", make_samples(20), **arguments)
    trainer = make_trainer(tmp_path / "out", train_dataset=dataset, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=message):
        trainer.train()


def test_an_iterable_dataset_trains_in_native_batches_too(tmp_path):
    dataset = PackedIterableDataset(
        [IterableStream([[1, 2, 3]] * 40)], packing=Packing(max_seq_len=8), batch_size=2
    )
    trainer = make_trainer(tmp_path / "out", train_dataset=dataset, max_steps=20)
    assert np.isfinite(trainer.train().training_loss)
    assert trainer.state.global_step == 20, "it continues with the next epoch"


def test_the_mix_in_is_for_trainers_of_your_own(tmp_path):
    class Halved(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            loss = model(**inputs).loss / 2
            return (loss, None) if return_outputs else loss

    class PackedHalved(PackedTrainerMixin, Halved):
        pass

    dataset, samples = held_out(tmp_path, 41)
    trainer = make_trainer(tmp_path / "out", cls=PackedHalved, eval_dataset=dataset)
    wanted = unpacked_loss(trainer.model, samples) / 2
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, abs=1e-5)


# Leaks.


class SeesAll(torch.nn.Module):
    """Sums all earlier tokens, of any sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(99, 99)

    def forward(self, input_ids: Any, position_ids: Any, labels: Any = None, **_: Any) -> Any:  # noqa: ARG002
        logits = self.table(input_ids).cumsum(1)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        return CausalLMOutput(loss=loss, logits=logits)


def test_a_model_that_leaks_is_refused_before_it_is_trained(tmp_path):
    dataset = make_dataset(tmp_path / "a", make_samples(60))
    options = {"model": SeesAll(), "train_dataset": dataset, "max_steps": 2}
    with pytest.raises(ConfigError, match=r"SeesAll .*check_leaks=False to train nevertheless"):
        make_trainer(tmp_path / "out", **options).train()
    make_trainer(tmp_path / "out", **options, check_leaks=False).train()


def test_an_error_of_the_model_is_no_leak(tmp_path):
    class Refusing(SeesAll):
        def forward(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:  # noqa: ARG002
            raise AssertionError("not on this device")

    dataset = make_dataset(tmp_path / "a", make_samples(60))
    trainer = make_trainer(tmp_path / "out", model=Refusing(), train_dataset=dataset, max_steps=2)
    with pytest.raises(AssertionError, match="not on this device"):
        trainer.train()  # a ConfigError, where it leaks


def test_batches_that_show_nothing_are_warned_of_and_trained_on(tmp_path, caplog):
    packing = Packing(max_seq_len=MAX_SEQ_LEN, max_samples_per_pack=1)
    dataset = make_dataset(tmp_path / "a", make_samples(60), packing=packing)
    options = {"model": SeesAll(), "train_dataset": dataset, "max_steps": 2}
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path / "out", **options).train()
    assert "not checked for leaks between samples in 10 batches" in caplog.text


def test_a_model_without_positions_trains_on_one_sample_in_a_row_only(tmp_path):
    options = {"vocab_size": 99, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    one_each = Packing(max_seq_len=MAX_SEQ_LEN, max_samples_per_pack=1)
    for packing in (Packing(max_seq_len=MAX_SEQ_LEN), one_each):
        dataset = make_dataset(tmp_path / "a", make_samples(60), packing=packing)
        trainer = make_trainer(
            tmp_path / "out",
            model=BloomForCausalLM(BloomConfig(**options)),
            train_dataset=dataset,
            max_steps=2,
        )
        if packing is one_each:
            trainer.train()
        else:
            with pytest.raises(ConfigError, match=r"no position_ids.*max_samples_per_pack=1"):
                trainer.train()


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_losses_of_streams_are_weighed_and_held_out_ones_are_not(tmp_path, attention):
    weights, parts = {"a": 2.5, "b": 0.25}, {}
    for number, name in enumerate(weights):
        parts[name] = make_samples(16, seed=number)
        write_stream(parts[name], tmp_path / name)
    dataset = PackedStreamingDataset(
        [
            Stream(local=tmp_path / name, loss_mask="loss_mask", loss_weight=weight)
            for name, weight in weights.items()
        ],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
    )
    model = make_model()
    sums = {name: unpacked_loss(model, each) for name, each in parts.items()}
    counts = {name: sum(map(len, labels_wanted(each))) for name, each in parts.items()}
    total = sum(counts.values())
    trainer = make_trainer(
        tmp_path / "out",
        model=model,
        train_dataset=dataset,
        eval_dataset=dataset,
        gradient_accumulation_steps=-(-len(dataset) // 2),  # one step takes the whole epoch
        max_steps=1,
        logging_steps=1,
        learning_rate=0.0,
    )
    model.config._attn_implementation = attention  # decides the format
    if attention == "flash_attention_2":
        trainer.check_leaks = False
        batches = trainer._batches_of(trainer._filled(dataset))
        assert all(each["loss_weight"].shape == each["labels"].shape for each in batches)
        assert all(each["labels"].shape[0] == 1 for each in batches)
        return
    trainer.train()

    wanted = sum(weights[name] * sums[name] * counts[name] for name in weights) / total
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-3)
    plain = sum(sums[name] * counts[name] for name in weights) / total
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-5)


class Copying(Trainer):
    """Copies every tensor, as Trainer does for a GPU, and records where the tokens come from."""

    def _prepare_input(self, data):
        prepared = super()._prepare_input(data)
        return prepared.clone() if torch.is_tensor(prepared) else prepared

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            origin = self.provenance(inputs)
            self.seen.append((origin, inputs["input_ids"], self.state.global_step))
        return super().compute_loss(model, inputs, *args, **kwargs)


class PackedCopying(PackedTrainerMixin, Copying):
    pass


@pytest.mark.parametrize("weight", [None, 2.0])
def test_provenance_is_found_for_inputs_that_the_trainer_copied(tmp_path, weight):
    for number, name in enumerate(["a", "b"]):
        rows = [{"tokens": np.full(20, 1 + number)} for _ in range(160)]
        write_stream(rows, tmp_path / name)
    dataset = PackedStreamingDataset(
        [Stream(local=tmp_path / name, loss_weight=weight) for name in "ab"],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
    )
    trainer = make_trainer(
        tmp_path / "out",
        cls=PackedCopying,
        train_dataset=dataset,
        eval_dataset=dataset,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=RECENT // 2 + RECENT,  # fetched before the first is used
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
    )
    trainer.seen = []
    trainer.train()

    assert len(trainer.seen) >= RECENT + 2
    for origin, ids, step in trainer.seen:
        np.testing.assert_array_equal(origin.stream_ids, ids.numpy() - 1)
        assert origin.step == step
    with pytest.raises(ConfigError, match="is not one of the last"):
        trainer.provenance({"input_ids": torch.zeros(1, 4)})
