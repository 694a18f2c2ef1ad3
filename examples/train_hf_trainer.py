"""Train a tiny Llama on packed batches with transformers' Trainer, on one rank or several.

::

    python examples/train_hf_trainer.py                               30 steps, made-up data
    torchrun --nproc-per-node 2 examples/train_hf_trainer.py          resumes, on two ranks

    PackedStreamingDataset --> PackedTrainer --> OUT/checkpoint-15/streampack.json, ...
                                     ^-------------------'

`PackedTrainer` takes the options that the dataset does not set from `TrainingArguments` and the
model: 2 packs per batch, 8 per optimizer step, position_ids that restart. Trainer itself divides
the loss by the number of targets in all micro-batches on all ranks.

Cost: 80 to 100 ms per step on one core, after about 10 s of imports.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from streampack import PackedStreamingDataset, Packing, Stream
from streampack.hf import PackedTrainer, last_checkpoint
from streampack.write import write_stream

VOCABULARY = 256
MAX_SEQ_LEN = 128
BATCH_SIZE = 2  # packs in a rank's batch
GLOBAL_BATCH_SIZE = 8  # packs in an optimizer step, over all ranks


def make_up_data(folder: Path) -> list[Path]:
    """Write two small streams of random tokens, unless they exist."""
    rng = np.random.default_rng(0)
    paths = [folder / "long", folder / "short"]
    for path, longest in zip(paths, (150, 30), strict=True):
        samples = [rng.integers(1, VOCABULARY, n) for n in rng.integers(2, longest, 100)]
        if not path.exists():
            write_stream(samples, path)
    return paths


def make_dataset(paths: Sequence[Path]) -> PackedStreamingDataset:
    """Return the training set; the trainer sets the batch size, ranks and format."""
    return PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in paths],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
    )


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
    """Train, resuming from the last checkpoint if there is one."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        # With several CPU ranks the device would be "cpu:0", which torch.load does not know.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    training = TrainingArguments(
        output_dir=str(args.out),
        ddp_find_unused_parameters=False,
        use_cpu=on_cpu,  # otherwise each CPU rank would train alone
        max_steps=args.steps,
        save_steps=args.save_every,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=GLOBAL_BATCH_SIZE // (BATCH_SIZE * num_ranks),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    with training.main_process_first():
        paths = make_up_data(args.out / "data")
    trainer = PackedTrainer(model=make_model(), args=training, train_dataset=make_dataset(paths))
    trainer.train(resume_from_checkpoint=last_checkpoint(args.out))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then leave the process group."""
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
