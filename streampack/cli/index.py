"""``streampack index PATHS``: write length files, with hashes, for streams that have none.

::

    PATH/index.json, PATH/*/index.json  -->  a lengths.bin next to each
    s3://bucket/stream/index.json       -->  s3://bucket/stream/lengths.bin, or --keep-local

Cost: each stream is read once; shards are decompressed one at a time. `streampack.write` is
imported lazily, so that the help page appears immediately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer import Argument, Option

from streampack import write as room
from streampack._paths import folder_of
from streampack.errors import ConfigError


def index(
    paths: Annotated[
        list[str], Argument(help="Folders that hold streams, or the URLs of remote streams.")
    ],
    tokens: Annotated[
        str | None, Option(help="Column of the token ids; by default tokens or input_ids.")
    ] = None,
    tokens_dtype: Annotated[
        str | None, Option(help="Integer type of the ids in a column of bytes.")
    ] = None,
    local: Annotated[
        Path | None, Option(help="Folder to keep the shards of a remote stream in.")
    ] = None,
    keep_local: Annotated[
        bool, Option("--keep-local", help="Keep the length file in --local; do not upload it.")
    ] = False,
) -> None:
    """Write the length files of streams that have none, with hashes where index.json has none."""
    remotes = [path for path in paths if folder_of(path) is None]
    if (local is not None or keep_local) and (len(remotes) != 1 or len(paths) != 1):
        raise ConfigError(
            f"--local={local}, --keep-local={keep_local}: are for one remote stream at a time, "
            f"got {' '.join(paths)}; call index for each"
        )
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} shards"), TimeElapsedColumn())
    written = []
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("shards", total=None)
        for path in paths:
            told = (tokens, tokens_dtype, lambda n: bar.advance(task, n))
            folder = folder_of(path)
            if folder is None:
                written += [
                    room.write_remote_lengths(path, *told, local=local, keep_local=keep_local)
                ]
            else:
                written += room.write_lengths(Path(folder), *told)
    for each in written:
        console.print(
            f"{each.path}: {each.num_samples:,} samples, {each.num_tokens:,} tokens in "
            f"{each.num_shards:,} shards, column {each.column!r}",
            highlight=False,
            soft_wrap=True,
        )
