"""`streampack write` compared with the tokenizer alone, on one core: one JSON line per case.

::

    python benchmarks/bench_write.py --megabytes 20 --runs 5

The text is real (the Python sources of this installation), stored as rows of JSON, and a BPE
tokenizer is trained on it. Both sides run in one thread and measure processor time, so that other
programs matter little. One side runs only the tokenizer, `encode_batch_fast` or gigatoken, on texts
in memory and discards the ids. The other reads the rows, tokenizes, encodes, compresses, hashes and
writes the stream. Runs take turns.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from pathlib import Path

import gigatoken
import record
import tokenizers
import zstandard
from bench_tokenize import read_texts, train_tokenizer

from streampack.texts import RowFormat
from streampack.texts.tokenization import Backend
from streampack.write import WriteOptions, write_texts

BATCH_ROWS = 256
CASES: tuple[tuple[Backend, str | None], ...] = (
    ("huggingface", None),
    ("huggingface", "zstd"),
    ("gigatoken", "zstd"),
)


def tokenizer_alone(path: Path, texts: list[str], backend: str) -> float:
    """Return tokens per second of a core."""
    exact, fast = tokenizers.Tokenizer.from_file(str(path)), gigatoken.Tokenizer(str(path))
    begin = time.process_time()
    num_tokens = 0
    for first in range(0, len(texts), BATCH_ROWS):
        batch = texts[first : first + BATCH_ROWS]
        if backend == "gigatoken":
            num_tokens += len(fast.encode_batch(batch, parallel=False).layout.content.data)
        else:
            num_tokens += sum(map(len, exact.encode_batch_fast(batch, add_special_tokens=False)))
    return num_tokens / (time.process_time() - begin)


def written(
    rows: Path, out: Path, tokenizer: Path, backend: Backend, compression: str | None
) -> float:
    """Return tokens per second of a core."""
    shutil.rmtree(out, ignore_errors=True)
    options = WriteOptions(
        rows=RowFormat(tokenizer=tokenizer, backend=backend),
        compression=compression,
        num_workers=1,
    )
    begin = time.process_time()
    num_tokens = write_texts([rows], out, options).num_tokens
    return num_tokens / (time.process_time() - begin)


def main() -> None:
    """Print a line for each case."""
    parser = record.options(__doc__)
    parser.add_argument("--megabytes", type=float, default=20)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = args.data / "write"
    folder.mkdir(parents=True, exist_ok=True)
    texts = read_texts(int(args.megabytes * 10**6))
    tokenizer = folder / "tokenizer.json"
    train_tokenizer(texts).save(str(tokenizer))
    rows = folder / "rows.jsonl.zst"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    rows.write_bytes(zstandard.compress(lines.encode()))
    for backend, compression in CASES:
        alone, ours = [], []
        for _ in range(args.runs):
            alone.append(tokenizer_alone(tokenizer, texts, backend))
            ours.append(written(rows, folder / "stream", tokenizer, backend, compression))
        params = {
            "texts": len(texts),
            "backend": backend,
            "compression": compression or "none",
            "vocabulary": 8192,
        }
        fields = {
            "tokenizer_alone": [round(speed) for speed in alone],
            "ratio": round(statistics.median(ours) / statistics.median(alone), 3),
        }
        libraries = ("gigatoken", "tokenizers", "zstandard")
        line = record.line("write/tokenize", "tokens/s", ours, params, libraries, **fields)
        record.emit(line, args.out)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
