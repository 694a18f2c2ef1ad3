"""Train a tiny Llama on packed batches with accelerate, on one rank or several.

::

    python examples/train_accelerate.py                               30 steps, made-up data
    torchrun --nproc-per-node 2 examples/train_accelerate.py          resumes, on two ranks
    accelerate launch --num-processes 2 --cpu examples/train_accelerate.py

    rank 0   micro-batches 0, 1 --.                      .--> weighted sum --> backward
                                   +--> units, all of --+
    rank 1   micro-batches 0, 1 --'      their targets   '--> weighted sum --> backward

`prepare` takes the model and the optimizer. The loader already knows its rank, so it is only
registered for checkpoints, which makes `save_state` and `load_state` include its position.

Cost: 80 to 100 ms per step on one core, after about 10 s of imports.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from streampack import (
    Mixing,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    loss_weights,
)
from streampack.formats import global_units, to_hf
from streampack.write import write_stream

VOCABULARY = 256
MAX_SEQ_LEN = 128
BATCH_SIZE = 2  # packs in a micro-batch
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


def make_loader(paths: Sequence[Path]) -> PackedDataLoader:
    """Return this rank's loader; the rank comes from the launcher's variables."""
    dataset = PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in paths],
        packing=Packing(max_seq_len=MAX_SEQ_LEN),
        # An epoch is a whole number of optimizer steps; with more ranks, each one accumulates less.
        mixing=Mixing(global_batch_size=GLOBAL_BATCH_SIZE),
        batch_size=BATCH_SIZE,
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


def epoch_after_epoch(loader: PackedDataLoader) -> Iterator[dict[str, Any]]:
    """Yield batches endlessly; each iteration over the loader is the next epoch."""
    while True:
        yield from loader


def train_step(
    accelerator: Accelerator, model: Any, optimizer: Any, micro_batches: Sequence[Any]
) -> float:
    """Train on this rank's part of a global batch; return the loss of the whole batch."""
    micro_batches = send_to_device(micro_batches, accelerator.device)
    units = global_units(micro_batches)  # of all ranks
    total = torch.zeros((), device=accelerator.device)
    for batch in micro_batches:
        # Only exchange gradients with the last micro-batch.
        is_last = batch is micro_batches[-1]
        with nullcontext() if is_last else accelerator.no_sync(model):
            logits = model(**to_hf(batch)).logits
            # Use the batch's labels, which are shifted and include the target at a sample's cut.
            losses = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
            weights = loss_weights(batch, units=units, num_ranks=accelerator.num_processes)
            loss = (weights * losses).sum()
            accelerator.backward(loss)
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(total, "mean"))


def save(accelerator: Accelerator, out: Path, step: int) -> None:
    """Write a checkpoint folder, under a temporary name until it is complete."""
    accelerator.save_state(str(out / "saving"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(out / "saving", out / f"checkpoint-{step}")
    accelerator.wait_for_everyone()


def load(accelerator: Accelerator, out: Path) -> int:
    """Load the newest checkpoint; return its number of steps."""
    steps = [int(path.name.rpartition("-")[2]) for path in out.glob("checkpoint-*")]
    if steps:
        accelerator.load_state(str(out / f"checkpoint-{max(steps)}"))
    return max(steps, default=0)


def train(args: argparse.Namespace) -> None:
    """Train, resuming from the last checkpoint if there is one."""
    # With its default of 1, `gradient_accumulation_steps` does not scale the loss. Without `cpu`
    # each CPU rank would train alone.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.main_process_first():
        paths = make_up_data(args.out / "data")
    loader = make_loader(paths)
    accelerator.register_for_checkpointing(loader)
    step = load(accelerator, args.out)
    batches = epoch_after_epoch(loader)
    num_micro_batches = GLOBAL_BATCH_SIZE // (BATCH_SIZE * accelerator.num_processes)
    while step < args.steps:
        micro_batches = list(islice(batches, num_micro_batches))
        loss = train_step(accelerator, model, optimizer, micro_batches)
        step += 1
        accelerator.print(f"epoch {micro_batches[0]['epoch']} step {step} loss {loss:.4f}")
        if step % args.save_every == 0:
            save(accelerator, args.out, step)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then leave the process group."""
    parser = argparse.ArgumentParser(description="Train on packs; resume if started again.")
    parser.add_argument("--out", type=Path, default=Path("train-output/accelerate"))
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
