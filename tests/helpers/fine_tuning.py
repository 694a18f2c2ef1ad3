"""A tiny model, samples with masked prompts, and a trainer for them.

Some samples have no target at all, so that whole batches have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from streampack import PackedStreamingDataset, Packing, Stream
from streampack.hf import PackedTrainer
from streampack.write import write_stream

VOCABULARY = 99
MAX_SEQ_LEN = 64

Sample = dict[str, np.ndarray]


def make_samples(number: int, seed: int = 0, *, targets: bool = True) -> list[Sample]:
    """Samples of 2 to 40 tokens; without `targets`, only the last one has any."""
    rng = np.random.default_rng(seed)
    samples = []
    for place in range(number):
        length = int(rng.integers(2, 40))
        mask = np.zeros(length, np.uint8)
        if targets or place == number - 1:
            mask[int(rng.integers(0, length - 1)) :] = 1
        samples.append({"tokens": rng.integers(1, VOCABULARY, length), "loss_mask": mask})
    return samples


def make_dataset(folder: Path, samples: Sequence[Sample], **arguments: Any) -> Any:
    """A dataset of these samples, which are written to disk if necessary."""
    if not folder.exists():
        write_stream(samples, folder)
    arguments.setdefault("packing", Packing(max_seq_len=MAX_SEQ_LEN))
    return PackedStreamingDataset([Stream(local=str(folder), loss_mask="loss_mask")], **arguments)


def make_model(hidden_size: int = 16) -> Any:
    """A tiny Llama with the same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQ_LEN,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def make_trainer(out: Path, *, cls: Any = PackedTrainer, **options: Any) -> Any:
    """A trainer on the CPU; options go to `TrainingArguments` if it has them, else to `cls`."""
    fields = TrainingArguments.__dataclass_fields__
    ours = {name: value for name, value in options.items() if name not in fields}
    arguments = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
    } | {name: value for name, value in options.items() if name in fields}
    args = TrainingArguments(output_dir=str(out), **arguments)
    return cls(args=args, **({"model": make_model()} | ours))


def unpacked_loss(model: Any, samples: Sequence[Sample]) -> float:
    """Return the mean loss over all targets, computed one sample at a time."""
    total, count = 0.0, 0
    for sample in samples:
        ids = torch.tensor(sample["tokens"])[None].long()
        labels = torch.where(torch.tensor(sample["loss_mask"])[None] > 0, ids, -100)
        targets = int((labels[:, 1:] != -100).sum())
        if targets:
            with torch.no_grad():
                total += model(input_ids=ids, labels=labels).loss.item() * targets
            count += targets
    return total / count
