"""Train a tiny Llama on packed batches with transformers' Trainer, on one rank or several.

::

    python examples/train_hf_trainer.py                               30 steps, made-up data
    torchrun --nproc-per-node 2 examples/train_hf_trainer.py          resumes, on two ranks

    PackedDataLoader --> get_train_dataloader, as it is --> Trainer --> OUT/checkpoint-15/
                <------ load_state_dict --- PackedTrainer <-- loader.json ---'

Three things keep it exact. Trainer gets the loader itself, not a dataset that it would shard again.
`batch_format="hf"` says ``use_cache=False``, without which samples of a pack see each other.
`LoaderState` saves the loader's state in each checkpoint, and keeps Trainer from skipping those
batches once more. Trainer itself divides the loss by the targets of all micro-batches on all ranks.

Cost: 80 to 100 ms a step on one core, after about 10 s of importing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from streampack import Mixing, PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.write import write_stream

VOCABULARY = 256
MAX_SEQ_LEN = 128
BATCH_SIZE = 2  # packs in a rank's batch
GLOBAL_BATCH_SIZE = 8  # packs in an optimizer step, over all ranks
LOADER_STATE = "loader.json"


class PackedTrainer(Trainer):
    """Trains on what a `PackedDataLoader` delivers to this rank."""

    def __init__(self, *args: Any, loader: PackedDataLoader, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        """Return the loader as it is: accelerate would shard it a second time."""
        num_ranks = self.loader.dataset.world.num_ranks
        if num_ranks != self.args.world_size:
            raise ValueError(
                f"the loader delivers to {num_ranks} ranks, Trainer trains on "
                f"{self.args.world_size}; on CPUs it needs use_cpu=True to see the others"
            )
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of the dataset that is evaluated, which begins with the same packs."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        dataset.set_epoch(0)
        return PackedDataLoader(dataset)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; every rank loads what rank 0 saved in the folder that is resumed."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(Path(str(self.args.output_dir)))
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint, LOADER_STATE)
            if not path.exists():
                raise ValueError(
                    f"{path} does not exist: the run was killed while it wrote this checkpoint; "
                    f"resume from {last_checkpoint(path.parent.parent)}"
                )
            self.loader.load_state_dict(json.loads(path.read_text()))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)


class LoaderState(TrainerCallback):
    """Keeps the loader's state in every checkpoint folder."""

    def __init__(self, loader: PackedDataLoader) -> None:
        dataset = loader.dataset
        if dataset.world.num_ranks > 1 and not isinstance(dataset, PackedStreamingDataset):
            raise ValueError(
                f"rank 0's state does not fit the other ranks of a {type(dataset).__name__}; save "
                "loader.state_dict() of every rank under the rank's number, and load it there"
            )
        self.loader = loader

    def on_init_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Let Trainer skip nothing: the loader resumes by itself."""
        args.ignore_data_skip = True

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the state, last of all: a folder that has it is complete."""
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            path = folder / LOADER_STATE
            path.with_suffix(".new").write_text(json.dumps(self.loader.state_dict()))
            os.replace(path.with_suffix(".new"), path)


def last_checkpoint(out: Path) -> str | None:
    """Return the newest complete checkpoint: a run may have been killed while it wrote one."""
    found = {int(path.parent.name[11:]): path for path in out.glob(f"checkpoint-*/{LOADER_STATE}")}
    return str(found[max(found)].parent) if found else None


def make_up_data(folder: Path) -> list[Path]:
    """Write two small streams of random tokens, once."""
    rng = np.random.default_rng(0)
    paths = [folder / "long", folder / "short"]
    for path, longest in zip(paths, (150, 30), strict=True):
        samples = [rng.integers(1, VOCABULARY, n) for n in rng.integers(2, longest, 100)]
        if not path.exists():
            write_stream(samples, path)
    return paths


def make_loader(paths: Sequence[Path]) -> PackedDataLoader:
    """Return this rank's loader; which rank it is, torchrun's variables say."""
    dataset = PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in paths],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        # An epoch is a whole number of optimizer steps: a resumed Trainer would not step on a
        # smaller group of micro-batches at its end.
        mixing=Mixing(global_batch_size=GLOBAL_BATCH_SIZE),
        batch_size=BATCH_SIZE,
        batch_format="hf",
    )
    return PackedDataLoader(dataset)


def make_model() -> LlamaForCausalLM:
    """Return a tiny Llama with random weights, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQ_LEN,
    )
    return LlamaForCausalLM(config)


def train(args: argparse.Namespace) -> None:
    """Train, from the last checkpoint if there is one."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        # On several CPU ranks the device would be "cpu:0", which torch.load knows nothing of.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    training = TrainingArguments(
        output_dir=str(args.out),
        ddp_find_unused_parameters=False,
        use_cpu=on_cpu,  # else each CPU rank would train for itself
        max_steps=args.steps,
        save_steps=args.save_every,
        per_device_train_batch_size=BATCH_SIZE,  # for Trainer's log: the loader makes the batches
        gradient_accumulation_steps=GLOBAL_BATCH_SIZE // (BATCH_SIZE * num_ranks),
        average_tokens_across_devices=True,  # else the mean of the ranks' means
        remove_unused_columns=False,  # formats such as hf_flash have keys forward does not name
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    with training.main_process_first():
        paths = make_up_data(args.out / "data")
    loader = make_loader(paths)
    trainer = PackedTrainer(
        model=make_model(), args=training, loader=loader, callbacks=[LoaderState(loader)]
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.out))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and leave the other ranks."""
    parser = argparse.ArgumentParser(description="Train on packs; resume if started again.")
    parser.add_argument("--out", type=Path, default=Path("train-output/hf_trainer"))
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps in all")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    args = parser.parse_args(arguments)

    train(args)
    # The model goes before the group: as a group's last owner, DDP can wait for gloo's threads for
    # ever (torch 2.13).
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
