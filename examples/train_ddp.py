"""Train a tiny decoder on packed batches with DistributedDataParallel, and survive kill -9.

::

    torchrun --nproc-per-node 2 examples/train_ddp.py                       a small epoch, made up
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_ddp.py --data a b --out run

    batches of a global batch --> log --> loss / targets of all ranks --> step
                                                                           '--> rank 0: checkpoint

Every rank iterates the same loader and gets its own batches. Only rank 0 writes the checkpoint,
since the loader's state is the same on every rank and fits any number of ranks. When torchrun or
you restart the training, it resumes from the last checkpoint with the same packs as if it had never
stopped.

Each rank logs its batches to OUT/consumed/run-<n>-from-step-<s>/rank<r>.jsonl, one per line. Lines
for steps that the next run repeats do not count.

Cost: under a second per step on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from streampack import (
    Mixing,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    block_causal_mask,
)
from streampack.write import write_stream

VOCABULARY = 1_000
IGNORED = -100  # the label of a token that is not a target


class Block(nn.Module):
    """Attention within each document of a pack, then a feed-forward layer."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.attended = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return the new hidden states, shape (B, S, dim)."""
        batch, length, dim = hidden.shape
        heads = self.query_key_value(self.before_attention(hidden))
        # (B, S, 3 * dim) -> 3 x (B, heads, S, dim of a head)
        heads = heads.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        hidden = hidden + self.attended(seen.transpose(1, 2).reshape(batch, length, dim))
        return hidden + self.feed_forward(hidden)


class Decoder(nn.Module):
    """A decoder for packs: positions restart in every document, and no document sees another."""

    def __init__(self, max_seq_len: int, dim: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads=2) for _ in range(num_layers))
        self.logits = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: Tensor, input_pos: Tensor, document_ids: Tensor) -> Tensor:
        """Return logits, shape (B, S, vocabulary)."""
        mask = block_causal_mask(document_ids)  # (B, 1, S, S)
        hidden = self.tokens(tokens) + self.positions(input_pos)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.logits(hidden)


class ConsumedLog:
    """Logs the samples that this rank trained on, in a new folder for each start."""

    def __init__(self, out: Path, first_step: int) -> None:
        name: list[str | None] = [None]
        if dist.get_rank() == 0:
            runs = out / "consumed"
            runs.mkdir(parents=True, exist_ok=True)
            name = [f"run-{len(list(runs.iterdir())):03}-from-step-{first_step}"]
            (runs / str(name[0])).mkdir()
        dist.broadcast_object_list(name)  # all ranks write into the same folder
        path = out / "consumed" / str(name[0]) / f"rank{dist.get_rank()}.jsonl"
        self._file = path.open("w", buffering=1)  # each line is written immediately

    def write(self, step: int, batch: dict[str, Any]) -> None:
        """Log a batch before training on it."""
        line = {key: batch[key] for key in ("epoch", "position")}
        # Row, stream, pass, sample, start and length of everything in it.
        line |= {"step": step, "pid": os.getpid(), "segments": batch["segments"].tolist()}
        self._file.write(json.dumps(line) + "\n")


def join_others(backend: str) -> None:
    """Join the process group of all ranks."""
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # After a restart by torchrun, ranks would find the addresses of the dead ones in the store.
        # (On several nodes: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, for a new store each time.)
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


def make_up_data(folder: Path) -> list[Path]:
    """Write two small streams of random tokens on rank 0, while the others wait."""
    paths = [folder / "long", folder / "short"]
    if dist.get_rank() == 0:
        rng = np.random.default_rng(0)
        for path, longest in zip(paths, (800, 100), strict=True):
            if not path.exists():
                lengths = rng.integers(1, longest, 400)
                write_stream((rng.integers(1, VOCABULARY, n) for n in lengths), path)
    dist.barrier()
    return paths


def make_loader(args: argparse.Namespace) -> PackedDataLoader:
    """Return this rank's loader; the rank comes from torchrun's variables."""
    paths = args.data or make_up_data(args.out / "data")
    dataset = PackedStreamingDataset(
        streams=[Stream(local=str(path)) for path in paths],
        packing=Packing(max_seq_len=args.max_seq_len),
        # Never changes: with more ranks, a step takes fewer batches from each, and the same packs.
        mixing=Mixing(global_batch_size=args.global_batch_size),
        batch_size=args.batch_size,
    )
    return PackedDataLoader(dataset)


def global_batches(loader: PackedDataLoader, global_batch_size: int) -> Iterator[list[Any]]:
    """Yield this rank's batches for each optimizer step, one or several."""
    dataset = loader.dataset
    num, rest = divmod(global_batch_size, dataset.batch_size * dataset.world.num_devices)
    if rest:
        raise SystemExit(
            f"--global-batch-size {global_batch_size} is not a multiple of {dataset.batch_size} "
            f"packs on each of {dataset.world.num_devices} ranks; set another --batch-size"
        )
    batches = iter(loader)
    while group := list(islice(batches, num)):
        yield group


def train_step(model: DistributedDataParallel, optimizer: Any, group: list[Any]) -> float:
    """Train on one global batch; return its mean loss over the targets of all ranks."""
    device = next(model.parameters()).device
    # Ranks and batches have different numbers of targets, so a mean of means would be wrong.
    num_targets = torch.tensor(sum(int((b["labels"] != IGNORED).sum()) for b in group)).to(device)
    dist.all_reduce(num_targets)
    total = torch.zeros((), device=device)
    for batch in group:
        tokens, labels, input_pos, document_ids = (
            batch[key].to(device) for key in ("tokens", "labels", "input_pos", "document_ids")
        )
        # Only exchange gradients with the last batch of the step.
        model.require_backward_grad_sync = batch is group[-1]
        logits = model(tokens, input_pos, document_ids)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / num_targets
        (loss * dist.get_world_size()).backward()  # DDP takes the mean over the ranks
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total)


def save(path: Path, parts: dict[str, Any], step: int) -> None:
    """Write a checkpoint so that the old or the new one is complete whenever the process dies."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, **states}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def load(path: Path, parts: dict[str, Any]) -> int:
    """Load the checkpoint into all parts; return its number of steps."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train to the end of the last epoch, resuming from the checkpoint if there is one."""
    torch.manual_seed(args.seed)
    model = Decoder(args.max_seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = make_loader(args)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = args.out / "checkpoint.pt"
    step = load(checkpoint, parts)
    consumed = ConsumedLog(args.out, step)
    wrapped = DistributedDataParallel(model)
    while loader.state_dict()["epoch"] < args.epochs:
        for group in global_batches(loader, args.global_batch_size):
            epoch = group[0]["epoch"]
            if epoch == args.epochs:  # the checkpoint was that of the last step
                return
            step += 1
            for batch in group:
                consumed.write(step, batch)
            loss = train_step(wrapped, optimizer, group)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {loss:.3f}", flush=True)
                # All ranks have exchanged gradients, so all have logged this step.
                if step % args.save_every == 0:
                    save(checkpoint, parts, step)
        if dist.get_rank() == 0:
            save(checkpoint, parts, step)


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train a tiny decoder on packed batches. It resumes when started again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", nargs="+", type=Path, help="folders of streams (made up if none)")
    parser.add_argument("--out", type=Path, default=Path("train-output"), help="what it leaves")
    parser.add_argument("--epochs", type=int, default=1, help="how often to go through the data")
    parser.add_argument("--max-seq-len", type=int, default=512, help="tokens in a pack")
    parser.add_argument("--batch-size", type=int, default=2, help="packs in a rank's batch")
    parser.add_argument("--global-batch-size", type=int, default=24, help="packs in a step")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the model's first weights")
    return parser.parse_args()


def main() -> None:
    """Join the other ranks, train, and leave them."""
    args = read_arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_others("nccl" if device.type == "cuda" else "gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, device)
    dist.barrier()  # rank 0 has saved, so a failure from here on costs no steps
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
