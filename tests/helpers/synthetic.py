"""Streams of any size with lengths but no tokens: a made-up index.json and length file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from streampack.mds.index import index_of
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces

SHARD_SAMPLES = 10_000


def write_lengths_only(folder: Path, num_samples: int, mean: int, seed: int) -> None:
    """Write a stream with lognormal lengths, in compressed shards that do not exist."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(0, 1.2, SHARD_SAMPLES), 0.01, 100)
    lengths = np.maximum(lengths * mean / lengths.mean(), 1).astype(np.uint32)
    sizes = [SHARD_SAMPLES] * (num_samples // SHARD_SAMPLES)
    entries = [
        {
            "version": 2,
            "format": "mds",
            "compression": "zstd",
            "hashes": [],
            "size_limit": None,
            "samples": size,
            "column_names": ["tokens"],
            "column_encodings": ["ndarray:uint16"],
            "column_sizes": [None],
            "raw_data": {"basename": f"s{n}.mds", "bytes": int(2 * lengths.sum()), "hashes": {}},
            "zip_data": {"basename": f"s{n}.mds.zstd", "bytes": int(lengths.sum()), "hashes": {}},
        }
        for n, size in enumerate(sizes)
    ]
    text = json.dumps({"version": 2, "shards": entries}).encode()
    folder.mkdir(parents=True)
    (folder / "index.json").write_bytes(text)
    every = np.tile(lengths, len(sizes))
    index = index_of(entries, str(folder / "index.json"))
    # Only bos_id and eos_id need the edges, so they are a hole at the end of the file.
    edges = np.broadcast_to(np.zeros(1, np.uint32), (len(every), 2))
    head = list(length_file_pieces(text, index, "tokens", every, edges[:, :]))[:4]
    with (folder / LENGTH_FILE).open("wb") as file:
        file.writelines(head)
        file.truncate(file.tell() + 8 * len(every))


def write_long_run(folder: Path) -> Path:
    """Write the YAML and the streams of a run of 1T tokens in three chapters; return its path."""
    sizes = {"web": (12, 8000), "code": (3, 6000), "math": (1, 5000), "long": (1, 30_000)}
    for seed, (name, (millions, mean)) in enumerate(sizes.items()):
        write_lengths_only(folder / "remote" / name, millions * 10**6, mean, seed)
    chapters: list[dict[str, Any]] = [
        {"weights": {"web": 0.8, "code": 0.2}, "until": "850b"},
        {
            "weights": {"web": {"start": 0.8, "stop": 0.3}, "code": 0.2}
            | {"math": {"start": 0.0, "stop": 0.5}},
            "until": "100b",
        },
        {
            "weights": {"long": 0.5, "web": 0.3, "code": 0.2},
            "packing": {"max_seq_len": 32_768},
            "batch_size": 2,
            "global_batch_size": 128,
            "until": "50b",
        },
    ]
    run = {
        "streams": [
            {"name": name, "remote": str(folder / "remote" / name)}
            | {"local": str(folder / "cache" / name)}
            for name in sizes
        ],
        "packing": {"max_seq_len": 8192},
        "mixing": {"batching_method": "stratified", "global_batch_size": 512},
        "order": {"seed": 17, "num_lanes": 64},
        "batch_size": 8,
        "chapters": chapters,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path
