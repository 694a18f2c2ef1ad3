"""The tokenizer of Hugging Face alone, in one thread: what no loader of texts can beat.

Cost: see benchmarks/bench_tokenize.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import text_sets
from tokenizers import Tokenizer

from peers.task import TEXTS, Case, Measured, Task
from peers.texts import Meter

PACKAGES = ("tokenizers",)


def encode(task: Task) -> Measured:
    """Encode texts that are in memory, 64 together and without special tokens."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(Path(task.raw, "tokenizer", "tokenizer.json")))
    texts = [
        row["text"]
        for name in text_sets.SETS
        for row in text_sets.rows_of(task.raw, name, task.workload)
    ]
    meter, num_tokens = Meter(), 0
    for first in range(0, len(texts), text_sets.TEXTS_TOGETHER):
        batch = texts[first : first + text_sets.TEXTS_TOGETHER]
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        num_tokens += sum(len(each.ids) for each in encoded)
    return Measured(tokens=num_tokens, **meter.stop())


CASES = {"encode_batch": Case(kind="texts", work=encode, workloads=TEXTS)}
