"""Zephon: tokenizes, packs and batches in a pipeline of threads.

Its packers that fit drop samples longer than a pack, so samples are split while they are tokenized,
as its documents advise. Packs have one token more than a row, since labels are the next tokens.
"Mixed by tokens" weighs by an estimate of tokens, the others by the numbers of samples.

A state needs all ranks together, which are threads here, and meet in a folder.

Cost: two to three seconds to the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import text_sets
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import MixtureSpec, StaticMixtureWorkSource, TokenEstimation

from peers.task import ROWS, TEXTS, Case, Measured, Task
from peers.texts import RANKS, STEPS, Meter, pass_over, size_of

PACKAGES = ("zephon", "tokenizers", "transformers", "pyarrow")
WITH_BINS = ("first_fit", "best_fit")
NUM_BINS = 64


def pipeline_of(task: Task, algorithm: str, *, by_tokens: bool = False) -> Pipeline:
    """Return a pipeline over both sets without an end."""
    sets = text_sets.sets_of(task.raw)
    datasets = [Dataset.from_path(name, f"{task.raw}/{name}.{task.workload}") for name in sets]
    unit = "tokens" if by_tokens else "rows"
    source = StaticMixtureWorkSource(
        datasets=datasets,
        mixture=MixtureSpec({name: float(each[unit]) for name, each in sets.items()}),
        chunk_size=1024,
        seed=17,
        exhausted_policy="repeat",
        token_estimation=TokenEstimation() if by_tokens else None,
    )
    pipeline, length = Pipeline(source), task.max_seq_len + 1
    if task.workload != "lists":
        pipeline = pipeline.tokenize(
            tokenizer_id=f"{task.raw}/tokenizer",
            field="text",
            parallelism=2,
            max_length=length,
            split_long_samples=True,
            special_tokens="eos",
            add_attention_mask=False,
        )
    bins = {"num_bins": NUM_BINS} if algorithm in WITH_BINS else {}
    packed = pipeline.pack_flat(
        max_length=length, algorithm=algorithm, pad_token_id=text_sets.PAD_ID, **bins
    )
    return packed.batch(microbatch_size=task.batch_size)


def _counted(batches: Iterator[Any]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    for batch in batches:
        fields = batch.to_training(return_labels=True, return_cu_seqlens=True)
        tokens = np.zeros(len(text_sets.SETS), np.int64)
        for record in batch.records:
            for component, count in record.meta.component_token_counts.items():
                tokens[component] += count
        # A pack has one token more than a row.
        yield fields["input_ids"].numel() + len(batch), tokens


def load(task: Task, algorithm: str, *, by_tokens: bool = False) -> Measured:
    """Batches of packs with labels, positions and the ends of documents."""
    meter = Meter()
    pipeline = pipeline_of(task, algorithm, by_tokens=by_tokens)
    batches = iter(pipeline)
    measured = pass_over(task, meter, _counted(batches))
    measured.more["state_bytes"] = size_of(pipeline.checkpoint())
    batches.close()
    return measured


def resume(task: Task) -> Measured:
    """From the state of four ranks to the first batch of rank 0 of two."""

    def of_rank(rank: int, num_ranks: int) -> Pipeline:
        return pipeline_of(task, "wrap").options(
            global_rank=rank,
            world_size=num_ranks,
            canonical_replicas=RANKS,
            aggregate_dir=folder,
            run_id=f"{num_ranks}-ranks",
        )

    def state_of(rank: int) -> Any:
        pipeline = of_rank(rank, RANKS)
        batches = iter(pipeline)
        for _ in islice(batches, STEPS // RANKS):
            pass
        state = pipeline.checkpoint()  # waits for all ranks
        batches.close()
        return state

    with TemporaryDirectory() as folder:
        with ThreadPoolExecutor(RANKS) as ranks:
            state, *_ = ranks.map(state_of, range(RANKS))
        meter = Meter()
        pipeline = of_rank(0, RANKS // 2)
        pipeline.restore(state)
        batches = iter(pipeline)
        _, tokens = next(_counted(batches))
        spent = meter.stop()
        batches.close()
    return Measured(tokens=int(tokens.sum()), **spent, more={"state_bytes": size_of(state)})


CASES = {
    name: Case(kind="texts", work=partial(load, algorithm=name), workloads=ROWS)
    for name in ("wrap", "best_fit_wrap", *WITH_BINS)
}
CASES["wrap, mixed by tokens"] = Case(
    kind="texts", work=partial(load, algorithm="wrap", by_tokens=True), workloads=TEXTS
)
CASES["wrap, half the ranks"] = Case(kind="resume", work=resume, workloads=ROWS)
