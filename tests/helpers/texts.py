"""Files of texts and conversations, and datasets of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streampack import Chats, Mixing, Order, PackedStreamingDataset, Packing, Stream, Texts, World
from streampack.storage.filesystem import LocalFilesystem
from streampack.streams.text_opening import _kept_tokenizer
from tests.helpers.chats import LETTERS, chat_tokenizer, chats, words

NUM_ROWS = 210
PACKING = Packing(max_seq_len=64, overflow="split")


def texts(num: int = NUM_ROWS, seed: int = 0) -> list[str]:
    """Return texts of known words; each seventh is empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, num) * (np.arange(num) % 7 != 3)
    return [" ".join(rng.choice(list(LETTERS), int(n))) for n in lengths]


def ids_of(rows: list[str]) -> list[list[int]]:
    tokenizer = words()
    return [tokenizer.encode(row).ids for row in rows]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def digest_of_texts(local: Path) -> str:
    """Return the digest of a dataset of texts, after the name of a tokenizer of chats."""
    name = _kept_tokenizer(chat_tokenizer(), local, LocalFilesystem()).name
    stream = Stream(Texts(texts(1000), words(), local=local))
    return f"{name} {PackedStreamingDataset([stream], packing=PACKING).digest}"


def write_files(folder: Path) -> Path:
    """Write the same rows as JSON lines and Parquet, conversations, and a tokenizer."""
    rows = [{"text": text} for text in texts()]
    write_lines(folder / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=20)
    write_lines(folder / "chats.jsonl", chats(NUM_ROWS))
    chat_tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def source_of(folder: Path, name: str, local: Path | None, **options: Any) -> Any:
    kind = Chats if name.startswith("chats") else Texts
    return kind(folder / name, folder / "tokenizer", local=local, **options)


def dataset_of(source: Any, world: World | None = None, **options: Any) -> PackedStreamingDataset:
    mixing = {"global_batch_size": 8, **options.pop("mixing", {})}
    return PackedStreamingDataset(
        [Stream(source, **options.pop("stream", {}))],
        mixing=Mixing(**mixing),
        order=Order(**{"seed": 3, "num_lanes": 1, **options.pop("order", {})}),
        world=world or World(),
        **{"packing": PACKING, "batch_size": 2, **options},
    )


def tokens_of(batches: Any) -> list[list[int]]:
    """Return the tokens of each segment, in order of delivery."""
    found = []
    for batch in batches:
        place: dict[int, int] = {}
        for row, *_, count in batch["segments"].tolist():
            first = place.get(row, 0)
            found.append(batch["tokens"][row, first : first + count].tolist())
            place[row] = first + count
    return found
