"""Two seeded sets of texts, as JSON lines, as Parquet, and as lists of token ids in Parquet.

::

    name    rows    tokens of a row                    share of tokens
    web     2 / 3   lognormal, median about 400        0.8
    code    1 / 3   as web, half as long               0.2

    web.jsonl/0.jsonl ...   web.parquet/0.parquet ...   web.lists/0.parquet ...   8 files each
    tokenizer/              a byte-level BPE of 16,000 ids, for `tokenizers` and transformers
    sets.json               rows and tokens of each set, with an end-of-text token for each row

The text is real (the Python sources of this installation), cut at random places. Everything is
written once and stays in the data folder for the next bench.

Cost: about a minute for the default 24,000 rows, nearly all of it the tokenizer's. On disk: 300 MB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import workloads
from tokenizers import ByteLevelBPETokenizer, Tokenizer

__all__ = ["EOS_ID", "NUM_ROWS", "SETS", "rows_of", "write"]

SETS = {"web": (2 / 3, 1), "code": (1 / 3, 2)}
"""The share of the rows of each set, and by what the lengths of `web` are divided."""
NUM_ROWS = 24_000
NUM_FILES = 8
ROW_GROUP = 1000
CHARS_PER_TOKEN = 3.4
LEAST_CHARS = 40
VOCABULARY = 16_000
EOS, PAD = "<eos>", "<pad>"
EOS_ID, PAD_ID = 0, 1
TEXTS_TOGETHER = 64


def _texts(name: str, num_rows: int) -> Iterator[str]:
    from bench_tokenize import read_texts  # it imports streampack, which not every peer needs

    corpus = "\n".join(read_texts(64 << 20))
    lengths = workloads.lengths("web", num_rows) * (CHARS_PER_TOKEN / SETS[name][1])
    generator = np.random.default_rng(list(SETS).index(name))
    for chars in lengths.astype(np.int64).clip(LEAST_CHARS, len(corpus) // 2).tolist():
        begin = int(generator.integers(len(corpus) - chars))
        yield corpus[begin : begin + chars]


def _train(texts: list[str], folder: Path) -> Tokenizer:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=[EOS, PAD], show_progress=False
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    # What transformers reads beside it.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write_set(folder: Path, name: str, texts: list[str], tokenizer: Tokenizer) -> int:
    """Write the files of a set; return its tokens."""
    places = {kind: folder / f"{name}.{kind}" for kind in ("jsonl", "parquet", "lists")}
    for place in places.values():
        place.mkdir()
    num_tokens = 0
    for number in range(NUM_FILES):
        part = texts[number::NUM_FILES]
        rows = [{"id": row, "text": text} for row, text in enumerate(part)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (places["jsonl"] / f"{number}.jsonl").write_text(lines)
        encoded = [
            encoding.ids
            for first in range(0, len(part), TEXTS_TOGETHER)
            for encoding in tokenizer.encode_batch_fast(
                part[first : first + TEXTS_TOGETHER], add_special_tokens=False
            )
        ]
        num_tokens += sum(map(len, encoded)) + len(encoded)
        lists = pa.table({"tokens": pa.array(encoded, pa.list_(pa.int32()))})
        for kind, table in (("parquet", pa.Table.from_pylist(rows)), ("lists", lists)):
            path = places[kind] / f"{number}.parquet"
            pa.parquet.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP)
    return num_tokens


def write(folder: Path, num_rows: int | None = None) -> Path:
    """Write both sets, unless an earlier bench has; return their folder."""
    count = NUM_ROWS if num_rows is None else num_rows
    out = folder / f"texts-{count}"
    if out.exists():
        return out
    partial = folder / f"texts-{count}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    texts = {name: list(_texts(name, round(count * share))) for name, (share, _) in SETS.items()}
    tokenizer = _train(
        [text for each in texts.values() for text in each[::20]], partial / "tokenizer"
    )
    sets = {
        name: {"rows": len(each), "tokens": _write_set(partial, name, each, tokenizer)}
        for name, each in texts.items()
    }
    (partial / "sets.json").write_text(json.dumps(sets))
    return partial.rename(out)


def sets_of(folder: str) -> dict[str, dict[str, int]]:
    """Return the rows and tokens of each set."""
    sets: dict[str, dict[str, int]] = json.loads((Path(folder) / "sets.json").read_text())
    return sets


def rows_of(folder: str, name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a set from its files, as a script without a loader reads them."""
    for path in sorted((Path(folder) / f"{name}.{kind}").iterdir()):
        if path.suffix == ".jsonl":
            with path.open() as file:
                yield from map(json.loads, file)
        else:
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(ROW_GROUP):
                yield from batch.to_pylist()
