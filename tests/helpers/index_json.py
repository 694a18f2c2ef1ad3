"""The text of an index.json with one shard, and changes to it."""

from __future__ import annotations

import copy
import json
from typing import Any

SHARD: dict[str, Any] = {
    "version": 2,
    "format": "mds",
    "compression": "zstd",
    "hashes": [],
    "size_limit": 4096,
    "samples": 3,
    "column_names": ["source", "tokens"],
    "column_encodings": ["str", "ndarray:int32"],
    "column_sizes": [None, None],
    "raw_data": {"basename": "shard.00000.mds", "bytes": 400, "hashes": {}},
    "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 100, "hashes": {}},
}


def index_text(**changes: Any) -> bytes:
    shard = copy.deepcopy(SHARD)
    for path, value in changes.items():
        target = shard
        *parents, last = path.split("__")
        for parent in parents:
            target = target[parent]
        target[last] = value
    return json.dumps({"version": 2, "shards": [shard]}).encode()
