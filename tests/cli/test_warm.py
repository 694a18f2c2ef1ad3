"""`streampack write --warm`: the texts of a run are tokenized ahead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from streampack import ConfigError, PackedDataLoader
from streampack.cli.build import from_config
from streampack.texts import units
from tests.helpers.texts import write_files
from tests.helpers.verbs import call_verb


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(units, "SHARD_BYTES", 1000)
    return write_files(tmp_path)


def config_of(folder: Path, name: str = "run", **options: object) -> Path:
    given = {"tokenizer": str(folder / "tokenizer"), "local": str(folder / "cache")}
    files = {f"{key}s": f"{folder}/rows.{key}" for key in ("jsonl", "parquet")}
    texts = [
        {"name": key, "texts": {"files": path, "lengths": lengths, **given}}
        for (key, path), lengths in zip(files.items(), ("lazy", "eager"), strict=True)
    ]
    run = {
        "streams": texts,
        "packing": {"max_seq_len": 64},
        "mixing": {"epoch_end": "carry"},
        **options,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_a_run_tokenizes_nothing_after_its_caches_were_warmed(folder):
    config = config_of(folder)
    said = call_verb("write", "--warm", config)
    assert f"jsonls: 9 token shards in {folder}/cache/tokens, 9 tokenized now" in said
    loader = PackedDataLoader(from_config(config))
    assert list(loader)
    assert loader.stats()["shards"]["tokenized"] == 0
    # What is missing is made, also where all lengths are known already.
    shards = sorted(path for path in (folder / "cache/tokens").glob("??/*") if path.is_file())
    for path in shards[::2]:
        path.unlink()
    said = call_verb("write", "--warm", config, "--num-workers", 1)
    counts = [int(line.split(", ")[1].split()[0]) for line in said.splitlines() if ", " in line]
    assert sum(counts) == len(shards[::2])
    assert all(path.is_file() for path in shards)
    for path in shards[::2]:
        path.unlink()
    said = call_verb("run", config)
    number = len(shards[::2])
    assert re.search(rf"^{number} shards of text tokenized \([\d.]+/s\) · waited ", said, re.M)


def test_what_cannot_be_kept_or_has_no_texts_is_refused(folder):
    limited = config_of(folder, "limited", buffers={"cache_limit": 9000})
    with pytest.raises(ConfigError, match="cache_limit has 9000 bytes left"):
        call_verb("write", "--warm", limited)
    without = config_of(folder, "without", streams=[{"local": "data"}])
    with pytest.raises(ConfigError, match="has no texts or conversations to tokenize"):
        call_verb("write", "--warm", without)
    with pytest.raises(ConfigError, match="does not go with --warm"):
        call_verb("write", "--warm", without, "--text", "body")
    with pytest.raises(ConfigError, match="--out: is needed"):
        call_verb("write", folder / "rows.jsonl")


def test_with_a_limit_what_is_decoded_on_the_way_drops_nothing_that_was_made(folder, monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 200)  # a row group is several shards
    texts = {
        "files": str(folder / "rows.parquet"),
        "tokenizer": str(folder / "tokenizer"),
        "lengths": "lazy",
    }

    def config(local: str, **buffers: int) -> Path:
        streams = [{"name": "rows", "texts": {**texts, "local": str(folder / local)}}]
        return config_of(folder, local, streams=streams, buffers={"tokenizing": 1, **buffers})

    opened = from_config(config("all")).streams.opened[0]
    shards, numbers = opened.shards, range(opened.num_shards)
    total = sum(shards.cache.file(shards.entry(n)).state.num_bytes for n in numbers)
    room = int(shards.raw_bytes.max())
    with pytest.raises(ConfigError, match="would drop what was made"):
        call_verb("write", "--warm", config("less", cache_limit=total + room))
    call_verb("write", "--warm", config("enough", cache_limit=total + room + opened.unit_bytes))
    loader = PackedDataLoader(from_config(config("enough")))
    assert list(loader)
    assert loader.stats()["shards"]["tokenized"] == 0
