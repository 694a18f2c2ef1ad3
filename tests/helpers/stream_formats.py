"""The same samples as a stream of every format, with several shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from streampack import Stream, TokenFiles
from streampack.index.token_index import index_files
from streampack.streams.stream import OPTIONS
from streampack.write import write_stream
from tests.helpers import flat

FORMATS = ("mds", "megatron", "olmo", "datatrove", "litdata", "arrow", "indexed")
"""The last one: files of Megatron that `streampack index` has hashed."""
SHARD_BYTES = 1024
LOCAL_FILES = {
    "mds": "*.mds",
    "megatron": "*.bin",
    "olmo": "*.npy",
    "datatrove": "*.ds",
    "litdata": "*.bin",
    "arrow": "*.arrow",
    "indexed": "*.bin",
}
"""The files with tokens."""


def documents_of(seed: int, num: int = 120) -> flat.Documents:
    """Return documents of 1 to 89 tokens, in which each token tells its place."""
    lengths = np.random.default_rng(seed).integers(1, 90, num)
    ends = np.cumsum(lengths)
    return [
        (np.arange(end - n, end) + 7_000 * seed + 1).astype("uint16")
        for n, end in zip(lengths, ends, strict=True)
    ]


def stream_of(**options: Any) -> Stream:
    """Return a stream of the options of its source, and its own; files of tokens are in `local`."""
    if "format" not in options:
        return Stream(**options)
    beside = {name: options.pop(name) for name in OPTIONS if name in options}
    files = options.pop("remote") if "remote" in options else options.pop("local")
    return Stream(TokenFiles(files, **options), **beside)


def write_format(form: str, folder: Path, documents: flat.Documents) -> dict[str, Any]:
    """Write documents as a stream in a new folder; return its options, without its place."""
    options: dict[str, Any] = {}
    if form == "mds":
        write_stream(
            documents, folder, tokens_dtype="uint16", size_limit=SHARD_BYTES, compression=None
        )
        return options
    folder.mkdir(parents=True)
    if form == "litdata":
        flat.write_litdata(folder, documents, chunk_bytes=SHARD_BYTES)
        return options
    half = len(documents) // 2
    for name, part in (("a", documents[:half]), ("b", documents[half:])):
        flat.write("megatron" if form == "indexed" else form, folder, part, name)
    options |= flat.options_of(form) | {"format": "megatron" if form == "indexed" else form}
    if form == "indexed":
        index = folder.with_name(f"{folder.name}-index")
        list(index_files(str(folder), index))
        options["index"] = index
    return options
