"""``streampack index PATHS``: write length files, with hashes, for streams that have none.

::

    PATH/index.json, PATH/*/index.json  -->  a lengths.bin next to each
    s3://bucket/stream/index.json       -->  s3://bucket/stream/lengths.bin, or --keep-local

Cost: each stream is read once; shards are decompressed one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from streampack._paths import folder_of
from streampack.cli.console import counted, output_console
from streampack.cli.verbs import Index
from streampack.errors import ConfigError
from streampack.write import write_lengths, write_remote_lengths


def run(options: Index) -> None:
    """Write the missing length files, and print a line for each."""
    paths, local, keep_local = options.paths, options.local, options.keep_local
    remotes = [path for path in paths if folder_of(path) is None]
    if (local is not None or keep_local) and (len(remotes) != 1 or len(paths) != 1):
        option = "keep_local" if keep_local else "local"
        raise ConfigError(
            f"{option}= is for one remote stream at a time, got {' '.join(paths)}; leave it out, "
            "or call index for each",
            option=option,
        )
    console = output_console()
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} shards"), TimeElapsedColumn())
    written = []
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("shards", total=None)
        for path in paths:
            arguments: dict[str, Any] = {
                "tokens": options.tokens,
                "tokens_dtype": options.tokens_dtype,
                "progress": lambda n: bar.advance(task, n),
                "check_dtypes": options.check_dtypes,
            }
            if (folder := folder_of(path)) is not None:
                written += write_lengths(Path(folder), **arguments)
                continue
            arguments |= {"local": local, "keep_local": keep_local}
            written.append(write_remote_lengths(path, **arguments))
    for stream in written:
        console.out(
            f"{stream.path}: {counted(stream.num_samples, 'sample')}, "
            f"{counted(stream.num_tokens, 'token')} in {counted(stream.num_shards, 'shard')}, "
            f"column {stream.column!r}",
            highlight=False,
        )
