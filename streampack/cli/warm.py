"""``streampack write --warm CONFIG``: tokenize the texts of a run ahead, into its cache folders.

::

    run.yaml --> its Texts and Chats --> each token shard that the run will read --> local=
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path

from streampack.cli.build import build_streams
from streampack.cli.config import read_config
from streampack.cli.console import counted, output_console, terminable
from streampack.cli.verbs import Write
from streampack.cli.write import refuse_stated
from streampack.errors import ConfigError
from streampack.streams.opening import open_streams
from streampack.streams.sources.chats import Chats
from streampack.streams.sources.texts import Texts
from streampack.streams.text_lengths import of_all_shards
from streampack.streams.text_shards import TextShards


def run_warm(options: Write) -> None:
    """Make the token shards of the texts of runs, and print a line for each of their streams."""
    others = {field.name for field in fields(options)} - {"inputs", "warm", "num_workers"}
    refuse_stated(options, others, "does not go with --warm: the run's YAML has it; omit it")
    for path in options.inputs:
        _warm(Path(path), options.num_workers)


def _warm(path: Path, num_workers: int | None) -> None:
    config = read_config(path)
    every = build_streams(config)
    streams = [each for each in every if isinstance(getattr(each, "source", None), Texts | Chats)]
    if not streams:
        raise ConfigError(
            f"{path}: has no texts or conversations to tokenize; name the YAML of a run that has, "
            "or omit --warm"
        )
    limit, console = config.buffers.cache_bytes, output_console()
    with terminable():
        opened = open_streams(
            streams,
            cache_limit=limit,
            num_workers=num_workers or config.buffers.processes(1),
        )
        total = 0
        for stream in opened:
            if isinstance(shards := stream.shards, TextShards):
                left = None if limit is None else limit - total
                total += _make_all(shards, left, stream.unit_bytes)
            console.out(
                f"{stream.name}: {counted(stream.num_shards, 'token shard')} in "
                f"{stream.cache.folder}, {stream.num_made[0]:,} tokenized now",
                highlight=False,
            )


def _make_all(shards: TextShards, limit: int | None, unit_bytes: int) -> int:
    """Make the token shards that are not here yet, and return the bytes of all of them."""
    total = 0
    # For a shard that is made, and what it is made of, room is reserved.
    room = shards.num_workers * (int(shards.raw_bytes.max()) + unit_bytes)
    for num_bytes in of_all_shards(shards, partial(_make, shards)):
        total += num_bytes
        if limit is not None and total + room > limit:
            raise ConfigError(
                f"cache_limit has {limit} bytes left for the token shards of {shards.name!r}, "
                f"which take more, and would drop what was made; raise Buffers(cache_limit=), or "
                "omit it"
            )
    return total


def _make(shards: TextShards, number: int) -> int:
    return shards.cache.file(shards.entry(number)).state.num_bytes
