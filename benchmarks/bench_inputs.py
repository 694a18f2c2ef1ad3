"""Readers of `streampack write`: one JSON line per format and size of rows.

::

    python benchmarks/bench_inputs.py --megabytes 100 --runs 5

The text is real (the Python sources of this installation), in rows of a text, a URL and two
numbers. A run reads all rows as texts and discards them, measuring processor time. `ratio` compares
it with a tokenizer of 10 M tokens/s: the reader needs 1 / ratio of that tokenizer's time.
"""

from __future__ import annotations

import csv
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import record
import zstandard
from bench_tokenize import read_texts

from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.values import RowSelection

BYTES_PER_TOKEN = 3.7  # of such text, with a vocabulary of 32,768
NEEDED_TOKENS_PER_S = 10_000_000
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "csv", "parquet", "arrow", "ids.jsonl", "ids.parquet")
SIZES = {"documents": 4000, "short": 200}
ROWS_TOGETHER = 1000


def rows_of(texts: list[str]) -> Iterator[dict[str, object]]:
    """Yield a row for each text."""
    for number, text in enumerate(texts):
        url = f"https://example.com/{number}"
        yield {"url": url, "text": text, "score": number / 7, "num_chars": len(text)}


def write_file(folder: Path, suffix: str, texts: list[str]) -> Path:
    """Write the rows as a file; ids are bytes of the text, one for each token."""
    path = folder / f"rows.{suffix}"
    rows = list(rows_of(texts))
    if suffix.startswith("ids."):
        rows = [{"tokens": list(text.encode()[:: round(BYTES_PER_TOKEN)])} for text in texts]
    if path.suffix in (".parquet", ".arrow"):
        table = pa.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pa.parquet.write_table(table, path, compression="zstd", row_group_size=ROWS_TOGETHER)
            return path
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, ROWS_TOGETHER)
        return path
    if suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        return path
    data = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, 6)
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return path


def read_all(path: Path, selection: RowSelection) -> tuple[int, float]:
    """Return the number of rows, and the processor seconds to read them."""
    begin = time.process_time()
    num_rows = 0
    for part in list_inputs([str(path)]):
        for batch in read_rows(part, selection):
            num_rows += len(batch.values)
    return num_rows, time.process_time() - begin


def main() -> None:
    """Print one line for each format and size."""
    parser = record.options(__doc__)
    parser.add_argument("--megabytes", type=float, default=100, help="of text in each file")
    args = parser.parse_args()
    folder = args.data / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    for size, num_chars in SIZES.items():
        long_texts = read_texts(int(args.megabytes * 10**6))
        texts = [
            text[first : first + num_chars]
            for text in long_texts
            for first in range(0, len(text), num_chars)
        ]
        num_bytes = sum(len(text.encode()) for text in texts)
        for suffix in FORMATS:
            path = write_file(folder, suffix, texts)
            selection = RowSelection("text", "text")
            if suffix.startswith("ids."):
                selection = RowSelection("tokens", "tokens")
            speeds = []
            for _ in range(args.runs):
                num_rows, seconds = read_all(path, selection)
                speeds.append(num_rows / seconds)
            path.unlink()
            median = sorted(speeds)[len(speeds) // 2]
            text_bytes_per_s = median * num_bytes / len(texts)
            fields = {
                "text_mb_per_s": round(text_bytes_per_s / 1e6, 1),
                "ratio": round(text_bytes_per_s / BYTES_PER_TOKEN / NEEDED_TOKENS_PER_S, 2),
            }
            params = {"format": suffix, "rows": size, "num_rows": len(texts)}
            line = record.line("write/inputs", "rows/s", speeds, params, ("orjson",), **fields)
            record.emit(line, args.out)


if __name__ == "__main__":
    main()
