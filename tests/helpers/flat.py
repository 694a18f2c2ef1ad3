"""Token files of other programs, for tests, made by the original writers if they can be installed.

The tools of Megatron and OLMo need their training packages, so short equivalents are written here,
following the layouts described in streampack/flat/megatron.py and olmo.py.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streampack import Shards, Stream, TokenFiles
from streampack.streams import open_stream

Documents = Sequence[npt.NDArray[Any]]
FORMATS = ("megatron", "olmo", "datatrove", "arrow", "litdata")


def make_documents(num: int = 300, seed: int = 1, dtype: str = "uint16") -> Documents:
    """Return documents of random ids; most are short, and one is empty."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.lognormal(4, 1, num), 1).astype(int)
    return [rng.integers(1, 1000, n).astype(dtype) for n in lengths]


def write_megatron(
    folder: Path, documents: Documents, name: str = "web", *, sequences: int = 1
) -> None:
    pieces = [piece for each in documents for piece in np.array_split(each, sequences)]
    (folder / f"{name}.bin").write_bytes(b"".join(piece.tobytes() for piece in pieces))
    lengths = np.array([len(piece) for piece in pieces], "<i4")
    ends = np.cumsum([piece.nbytes for piece in pieces])
    first = np.arange(0, len(pieces) + 1, sequences)
    code = {"uint16": 8, "int32": 4}[str(documents[0].dtype)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(pieces), len(first))
    tables = (lengths, np.concatenate([[0], ends[:-1]]).astype("<i8"), first.astype("<i8"))
    (folder / f"{name}.idx").write_bytes(head + b"".join(table.tobytes() for table in tables))


def write_olmo(folder: Path, documents: Documents, name: str = "web") -> None:
    """Write `.npy` without a header, and `.csv.gz`; some tokens follow the last document."""
    tokens = b"".join(each.tobytes() for each in documents)
    (folder / f"{name}.npy").write_bytes(tokens + b"\7\0" * 5)
    ends = np.cumsum([len(each) for each in documents])
    with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
        for number, (end, each) in enumerate(zip(ends, documents, strict=True)):
            file.write(f"{end - len(each)},{end},doc-{number},source.jsonl\n")


def write_datatrove(
    folder: Path, documents: Documents, name: str = "web", masks: Documents | None = None
) -> None:
    tokens = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    writer = tokens.TokenizedFile(
        str(folder),
        f"{name}.ds",
        token_size=documents[0].dtype.itemsize,
        save_final_metadata=True,
        tokenizer_name_or_path="gpt2",
        save_loss_metadata=masks is not None,
    )
    for each in documents:
        writer.write_bytes(each.tobytes())
    for mask in masks or ():
        writer.write_loss_bytes(mask.tobytes())
    writer.close()


def write_arrow(folder: Path, documents: Documents, name: str = "web") -> None:
    """Write an Arrow file as `datasets` does."""
    pa = pytest.importorskip("pyarrow")
    rows = pa.array([each.tolist() for each in documents], pa.list_(pa.uint16()))
    table = pa.table({"input_ids": rows, "source": ["x"] * len(documents)})
    path = str(folder / f"{name}.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def write_litdata(folder: Path, documents: Documents, **options: Any) -> None:
    writer_of = pytest.importorskip("litdata.streaming.writer").BinaryWriter
    writer = writer_of(str(folder), **{"chunk_bytes": 1 << 30, **options})
    for number, each in enumerate(documents):
        writer.add_item(number, each)
    writer.done()
    writer.merge(1)


def write(form: str, folder: Path, documents: Documents, name: str = "web") -> None:
    """Write documents as one file, or one chunk, of a format."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "litdata":
        write_litdata(folder, documents)
        return
    writers = {
        "megatron": write_megatron,
        "olmo": write_olmo,
        "datatrove": write_datatrove,
        "arrow": write_arrow,
    }
    writers[form](folder, documents, name)


def source_of(form: str, files: Any, **options: Any) -> Shards | TokenFiles:
    """Return the source of a format, at a path or a URL."""
    if form not in ("mds", "litdata"):
        return TokenFiles(files, **options_of(form), **options)
    is_remote = "local" in options
    return Shards(**{"remote" if is_remote else "local": files, **options})


def options_of(form: str) -> dict[str, Any]:
    return {"dtype": "uint16"} if form == "olmo" else {}


def read_documents(stream: Stream) -> Documents:
    """Return the tokens of every sample of a stream."""
    opened = open_stream(stream, 0)
    return [
        shard.tokens.read(shard.data, sample)
        for shard in map(opened.open_shard, range(opened.num_shards))
        for sample in range(len(shard.tokens.counts))
    ]


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """Return a file with some bytes changed, and sometimes truncated or extended."""
    data = np.frombuffer(content, np.uint8).copy()
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, max(len(data), 1)))
        kind = rng.integers(0, 4)
        if kind == 0:
            data[place : place + 8] = rng.integers(0, 256, len(data[place : place + 8]))
        elif kind == 1:
            data[place : place + 8] = 255
        elif kind == 2:
            data = data[:place]
        else:
            data = np.concatenate([data, data[: int(rng.integers(0, 64))]])
        if not len(data):
            break
    return data.tobytes()
