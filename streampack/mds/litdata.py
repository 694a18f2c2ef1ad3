"""litData's chunks as shards, by their index.json; columns.py finds an item's tokens in a chunk.

::

    chunk   u32 n | u32 offset[n + 1], from the chunk's first byte | item | item ...
    item    u32 size[leaves] | leaf | leaf ...      PyTreeLoader
            leaf                                    TokensLoader

Read are chunks of headerless arrays, as they are or compressed whole. Everything else stays that of
a stream of shards: lengths, caches, length files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streampack.errors import DataError

LITDATA = "litdata"
LITDATA_BARE = "litdata-bare"
"""Items without sizes, of one leaf."""
TOKENS_LOADER = "TokensLoader"
TENSORS = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32"}
TENSORS |= {17: "int64", 18: "int64", 20: "uint16"}
TEXTS = ("str", "text")
OTHER = "litdata:"  # before the kind of a leaf that is not read
ARRAYS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
WAY_OUT = "optimize it again with headerless arrays, or write a stream: streampack write --tokens"


def entries_of(document: Mapping[str, Any], uri: str) -> list[dict[str, Any]]:
    """Return the chunks of litData's index.json as entries of shards.

    Raises:
        DataError: If its items are not headerless arrays, or are encrypted or compressed one by
            one.
    """
    config, chunks = document["config"], document["chunks"]
    if not isinstance(config, dict) or not isinstance(chunks, list) or not chunks:
        raise DataError(f"{uri}: has no config or no chunks, so nothing was written; {WAY_OUT}")
    level = config.get("compression_level") or "chunk"
    for field, is_refused in (
        ("encryption", bool(config.get("encryption"))),
        ("compression_level", bool(config.get("compression")) and level != "chunk"),
    ):
        if is_refused:
            raise DataError(
                f"{uri}: config.{field} is {config[field]!r:.60}, but only chunks that are stored "
                f"as they are, or compressed whole, can be read; {WAY_OUT}"
            )
    names, encodings = _leaves(config, uri)
    is_bare = config.get("item_loader") == TOKENS_LOADER
    shared = {
        "version": 2,
        "format": LITDATA_BARE if is_bare else LITDATA,
        "column_names": names,
        "column_encodings": encodings,
        "column_sizes": [None] * len(names),
    }
    return [{**shared, **_files(chunk, config, uri)} for chunk in chunks]


def _leaves(config: Mapping[str, Any], uri: str) -> tuple[list[str], list[str]]:
    kinds = config.get("data_format")
    encodings = []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        storage, _, code = str(kind).partition(":")
        number = int(code) if code.isdecimal() else -1
        dtype = None
        if storage == "no_header_tensor":
            dtype = TENSORS.get(number)
        elif storage == "no_header_numpy" and number in range(len(ARRAYS)):
            dtype = ARRAYS[number]
        other = "str" if storage in TEXTS else f"{OTHER}{storage}"
        encodings.append(f"ndarray:{dtype}" if dtype else other)
    if all(encoding.startswith(OTHER) for encoding in encodings):
        raise DataError(
            f"{uri}: config.data_format is {kinds!r:.80}, but only texts and headerless arrays of "
            f"integers can be read: str, no_header_tensor and no_header_numpy; {WAY_OUT}"
        )
    try:
        context = json.loads(json.loads(config["data_spec"])[1]["context"])
        names = [str(name) for name in context]
    except (ValueError, KeyError, TypeError, IndexError):
        names = []
    if len(names) != len(encodings):
        only = "text" if encodings == ["str"] else "tokens"
        names = [only] if len(encodings) == 1 else [str(n) for n in range(len(encodings))]
    return names, encodings


def _files(chunk: Any, config: Mapping[str, Any], uri: str) -> dict[str, Any]:
    if not isinstance(chunk, dict) or not isinstance(chunk.get("filename"), str):
        raise DataError(f"{uri}: the chunk {chunk!r:.80} has no filename; copy index.json again")
    name, compression = chunk["filename"], config.get("compression")
    raw = {"basename": name, "bytes": chunk.get("chunk_bytes"), "hashes": {}}
    files = {"samples": chunk.get("chunk_size"), "raw_data": raw}
    if compression and f".{compression}." in name:  # rows of Arrow are compressed by themselves
        raw["basename"] = name.replace(f".{compression}.bin", ".bin")
        files |= {"zip_data": {**raw, "basename": name}, "compression": compression}
    return files
