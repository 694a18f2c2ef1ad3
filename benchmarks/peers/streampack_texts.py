"""streampack on texts where they lie, from an empty cache: planned, and as iterables.

Cost: see benchmarks/bench_tokenize.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import text_sets
from tokenizers import Tokenizer

from peers.task import ROWS, Case, Measured, Task
from peers.texts import RANKS, STEPS, Meter, pass_over, size_of
from streampack import (
    Buffers,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    Texts,
    TokenFiles,
    World,
)
from streampack.texts.pool import tokenizer_pool

PACKAGES = ("streampack", "tokenizers", "pyarrow")
STREAM, LENGTH = 1, 5  # columns of a batch's segments


def _counted(loader: Iterable[Any]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    for batch in chain.from_iterable(repeat(loader)):  # epoch after epoch
        segments = batch["segments"].numpy()
        lengths = np.bincount(segments[:, STREAM], segments[:, LENGTH], len(text_sets.SETS))
        yield batch["tokens"].numel(), lengths.astype(np.int64)


def planned_dataset(task: Task, cache: str) -> PackedStreamingDataset:
    """Both sets, mixed by their tokens without an end."""
    tokenizer, streams = Path(task.raw, "tokenizer", "tokenizer.json"), []
    for name, each in text_sets.sets_of(task.raw).items():
        ending = "jsonl" if task.workload == "jsonl" else "parquet"
        files, local = f"{task.raw}/{name}.{task.workload}/*.{ending}", f"{cache}/{name}"
        source: Any = TokenFiles(files, local=local)
        if task.workload != "lists":
            source = Texts(files, tokenizer, local=local, lengths="lazy")
        streams.append(Stream(source, name=name, proportion=each["tokens"]))
    return PackedStreamingDataset(
        streams,
        packing=Packing(max_seq_len=task.max_seq_len, eos_id=text_sets.EOS_ID),
        mixing=Mixing(weight_unit="tokens", epoch_end="carry"),
        order=Order(seed=17),
        batch_size=task.batch_size,
        buffers=Buffers(tokenizing=1),
    )


def planned(task: Task) -> Measured:
    """Batches of full packs, shuffled, in the plan's order; each run starts its process."""
    tokenizer_pool(1).close()
    with TemporaryDirectory() as cache:
        meter = Meter()
        loader = PackedDataLoader(planned_dataset(task, cache))
        measured = pass_over(task, meter, _counted(loader))
        measured.more["state_bytes"] = size_of(loader.state_dict())
        return measured


def resume(task: Task) -> Measured:
    """From a state of rank 0 of four to the first batch of rank 0 of two, on the same node."""
    with TemporaryDirectory() as cache:
        dataset = planned_dataset(task, cache).with_arguments(world=World(num_ranks=RANKS))
        loader = PackedDataLoader(dataset)
        for _, _ in zip(range(STEPS // RANKS), loader, strict=False):
            pass
        state = loader.state_dict()
        meter = Meter()
        half = planned_dataset(task, cache).with_arguments(world=World(num_ranks=RANKS // 2))
        loader = PackedDataLoader(half)
        loader.load_state_dict(state)
        tokens = int(next(iter(loader))["segments"][:, LENGTH].sum())
        return Measured(tokens=tokens, **meter.stop(), more={"state_bytes": size_of(state)})


@dataclass(frozen=True)
class _Rows:
    task: Task
    name: str

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return text_sets.rows_of(self.task.raw, self.name, self.task.workload)


def iterables(task: Task) -> Measured:
    """Batches of iterables that read the files and are packed as they come."""
    meter = Meter()
    is_text = task.workload != "lists"
    path = str(Path(task.raw, "tokenizer", "tokenizer.json"))
    tokenizer = Tokenizer.from_file(path) if is_text else None
    streams = [
        IterableStream(_Rows(task, name), proportion=each["tokens"], name=name, tokenizer=tokenizer)
        for name, each in text_sets.sets_of(task.raw).items()
    ]
    dataset = PackedIterableDataset(
        streams,
        packing=Packing(max_seq_len=task.max_seq_len, eos_id=text_sets.EOS_ID),
        mixing=Mixing(weight_unit="tokens", stop="repeat"),
        batch_size=task.batch_size,
    )
    loader = PackedDataLoader(dataset)
    measured = pass_over(task, meter, _counted(loader))
    measured.more["state_bytes"] = size_of(loader.state_dict())
    return measured


CASES = {
    "planned": Case(kind="texts", work=planned, workloads=ROWS),
    "iterables": Case(kind="texts", work=iterables, workloads=ROWS),
    "planned, half the ranks": Case(kind="resume", work=resume, workloads=ROWS),
}
