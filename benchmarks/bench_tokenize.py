"""On-the-fly tokenization and packing compared with the tokenizer alone: one JSON line.

::

    python benchmarks/bench_tokenize.py --num-workers 2 --runs 5

The text is real (the Python sources of this installation), and a BPE tokenizer is trained on it
first. Both sides use the same number of processes and encode all texts twice. Only the second time
counts, when processes have started, kernels are compiled and memory is warm. One side encodes its
part in batches of 64 and discards the tokens; the other is a `PackedDataLoader` over a
`PackedIterableDataset`, timed from requesting the epoch to its last batch. Runs take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sysconfig
import time
from pathlib import Path

import record
import tokenizers

from streampack import IterableStream, PackedDataLoader, PackedIterableDataset, Packing

TEXTS_TOGETHER = 64


def read_texts(num_bytes: int) -> list[str]:
    """Return real text in pieces of up to 4,000 characters."""
    texts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts += [text[first : first + 4000] for first in range(0, len(text), 4000)]
        total += len(text)
        if total >= num_bytes:
            break
    return texts


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer of 8,192 ids."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:500], vocab_size=8192, show_progress=False)
    return tokenizer._tokenizer


def encode(tokenizer_json: str, texts: list[str], begin, results) -> None:
    """Encode texts in a separate process; put the number of tokens and the seconds it took."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    for _ in range(2):
        begin.wait()
        start = time.perf_counter()
        num_tokens = 0
        for first in range(0, len(texts), TEXTS_TOGETHER):
            batch = texts[first : first + TEXTS_TOGETHER]
            encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            num_tokens += sum(len(item.ids) for item in encoded)
        seconds = time.perf_counter() - start
    results.put((num_tokens, seconds))


def tokenizer_alone(tokenizer: tokenizers.Tokenizer, texts: list[str], num_workers: int) -> float:
    """Return tokens per second."""
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(num_workers), context.Queue()
    processes = [
        context.Process(
            target=encode, args=(tokenizer.to_str(), texts[worker::num_workers], begin, results)
        )
        for worker in range(num_workers)
    ]
    for process in processes:
        process.start()
    done = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(tokens for tokens, _ in done) / max(seconds for _, seconds in done)


def packed(tokenizer: tokenizers.Tokenizer, texts: list[str], num_workers: int) -> float:
    """Return tokens per second of the second epoch."""
    dataset = PackedIterableDataset(
        [IterableStream(texts, tokenizer=tokenizer)],
        packing=Packing(max_seq_len=2048),
        batch_size=4,
    )
    loader = PackedDataLoader(dataset, num_workers=num_workers, prefetch_factor=4)
    for _ in range(2):
        start = time.perf_counter()
        num_tokens = sum(int(batch["segments"][:, 5].sum()) for batch in loader)
        seconds = time.perf_counter() - start
    return num_tokens / seconds


def main() -> None:
    """Print one line."""
    parser = record.options(__doc__)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=20)
    args = parser.parse_args()
    texts = read_texts(int(args.megabytes * 10**6))
    tokenizer = train_tokenizer(texts)
    alone, ours = [], []
    for _ in range(args.runs):
        alone.append(tokenizer_alone(tokenizer, texts, args.num_workers))
        ours.append(packed(tokenizer, texts, args.num_workers))
    params = {
        "num_workers": args.num_workers,
        "max_seq_len": 2048,
        "texts": len(texts),
        "vocabulary": 8192,
    }
    fields = {
        "tokenizer_alone": [round(speed) for speed in alone],
        "ratio": round(statistics.median(ours) / statistics.median(alone), 3),
    }
    line = record.line("load/tokenize", "tokens/s", ours, params, ("tokenizers",), **fields)
    record.emit(line, args.out)


if __name__ == "__main__":
    main()
