"""Runs of Trainer and Lightning that are killed while they save, each in forks of one process.

::

    python killed_trainers_job.py TOLD.json
        told["runs"]    name, trainer, dataset, number of ranks, folder, when it kills itself
                        --> FOLDER/steps-<name>-rank<r>.jsonl    the packs of each optimizer step
                            FOLDER/events-<name>    opens, renames, ... in the save of KILLED_AT

Rank 0 kills itself at one of these events, and the parent then kills the others, as torchrun would.
A run continues from the last checkpoint in its folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from streampack import (
    IterableStream,
    Order,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from streampack.hf import PackedTrainer, last_checkpoint
from streampack.lightning import PackedData
from streampack.write import write_stream
from tests.helpers.bigrams import Bigrams
from tests.helpers.trainers_seen import digest_of
from tests.helpers.worlds.torchrun_agents import fork_ranks

SAVE_EVERY = 2
KILLED_AT = 6  # the run is killed while it saves this step
MAX_STEPS = 10
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


class Watch:
    """Counts the file events while one step is saved, and kills the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.is_saving = False
        self.num_events = 0
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_saving or event not in EVENTS:
            return
        if event == "open" and not (
            isinstance(arguments[1], str) and set("wax") & set(arguments[1])
        ):
            return
        if self.num_events == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_events += 1


class Packs:
    """Logs the packs that a model was trained on, one line per optimizer step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._rows: list[str] = []
        register_module_forward_pre_hook(self._on_forward)

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:
        if isinstance(module, nn.Embedding) and module.training:
            self._rows += [digest_of(row) for row in arguments[0]]

    def end_step(self, step: int) -> None:
        self._file.write(json.dumps([step, self._rows]) + "\n")
        self._file.flush()
        self._rows = []


def make_dataset(kind: str, out: Path, world: World, batch_format: str) -> Any:
    packing = Packing(max_seq_len=64)
    if kind == "planned":
        return PackedStreamingDataset([Stream(local=str(out / "data"))], packing=packing)
    rng = np.random.default_rng(1)
    samples = [rng.integers(1, 99, n) for n in rng.integers(2, 40, 200)]
    return PackedIterableDataset(
        [IterableStream(samples)],
        packing=packing,
        order=Order(seed=5),
        batch_size=2,
        batch_format=batch_format,
        world=world,
        steps=7,  # a loop has seven batches, and the next one continues
    )


class Steps(TrainerCallback):
    def __init__(self, packs: Packs) -> None:
        self.packs = packs

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self.packs.end_step(state.global_step)


class WatchedTrainer(PackedTrainer):
    watch: Watch

    def _save_checkpoint(self, *args: Any, **kw: Any) -> None:
        self.watch.is_saving = self.state.global_step == KILLED_AT
        super()._save_checkpoint(*args, **kw)
        self.watch.is_saving = False


def run_trainer(kind: str, out: Path, world: World, watch: Watch, packs: Packs) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    args = TrainingArguments(
        output_dir=str(out / "saved"),
        max_steps=MAX_STEPS,
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = WatchedTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=make_dataset(kind, out, world, "hf"),
        callbacks=[Steps(packs)],
    )
    trainer.watch = watch
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "saved"))


class LightningSteps(Callback):
    def __init__(self, packs: Packs) -> None:
        self.packs = packs

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.last = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self.last:
            self.last = trainer.global_step
            self.packs.end_step(self.last)


class WatchedCheckpoint(ModelCheckpoint):
    watch: Watch

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self.watch.is_saving = trainer.global_step == KILLED_AT
        super()._save_checkpoint(trainer, filepath)
        self.watch.is_saving = False


def run_lightning(kind: str, out: Path, world: World, watch: Watch, packs: Packs) -> None:
    torch.manual_seed(0)
    saving = WatchedCheckpoint(
        dirpath=out / "saved",
        filename="last",
        every_n_train_steps=SAVE_EVERY,
        enable_version_counter=False,
    )
    saving.watch = watch
    trainer = LightningTrainer(
        max_steps=MAX_STEPS,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=world.num_ranks,
        strategy="ddp" if world.num_ranks > 1 else "auto",
        # Save before reporting the step, so that a kill never falls between the two.
        callbacks=[LightningSteps(packs), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = out / "saved" / "last.ckpt"
    data = PackedData(make_dataset(kind, out, world, "native"), batch_size=2)
    trainer.fit(Bigrams(), datamodule=data, ckpt_path=str(last) if last.exists() else None)


def run_rank(rank: int, told: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    out = Path(told["out"])
    world = World(rank=rank, num_ranks=told["ranks"])
    watch = Watch(told["kill_at"] if rank == 0 else None)
    packs = Packs(out / f"steps-{told['name']}-rank{rank}.jsonl")
    run = {"trainer": run_trainer, "lightning": run_lightning}[told["trainer"]]
    run(told["dataset"], out, world, watch, packs)
    if rank == 0:  # which is the one to be killed
        (out / f"events-{told['name']}").write_text(str(watch.num_events))


def main() -> None:
    """Do all runs one after the other, each in new processes."""
    for told in json.loads(Path(sys.argv[1]).read_text())["runs"]:
        out = Path(told["out"])
        if not (out / "data").exists():
            rng = np.random.default_rng(0)
            samples = [rng.integers(1, 99, n) for n in rng.integers(2, 40, 120)]
            write_stream(samples, out / "data")
        if "share" in told:  # a share of the events that the previous, uninterrupted run had
            before = int((Path(told["of"]) / f"events-{told['of_run']}").read_text())
            told["kill_at"] = int(told["share"] * before)
        first, *others = fork_ranks(run_rank, told["ranks"], told)
        if told["kill_at"] is None:
            is_expected = first == 0 and not any(others)
        else:  # another rank may fail because it lost rank 0, before it is stopped
            is_expected = first == -signal.SIGKILL and 0 not in others
        if not is_expected:
            sys.exit(f"run {told}: the ranks ended with {[first, *others]}")


if __name__ == "__main__":
    main()
