"""``streampack index PATHS``: length files for streams that were written without.

::

    PATH/index.json, PATH/*/index.json  -->  a lengths.bin beside each

Cost: one reading of each stream; shards are decompressed in memory, one at a time. The room that
writes is loaded at the first use of a name of it, so that the help page comes at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer import Argument, Option

from streampack import write as room

__all__ = ["index"]


def index(
    paths: Annotated[list[Path], Argument(help="Streams, or folders that hold streams.")],
    column: Annotated[
        str | None, Option(help="The token column; by default tokens or input_ids.")
    ] = None,
    tokens_dtype: Annotated[
        str | None, Option(help="Integer type of the ids in a column of bytes.")
    ] = None,
) -> None:
    """Write the length files of streams that have none."""
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} shards"), TimeElapsedColumn())
    written = []
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("shards", total=None)
        for path in paths:
            written += room.write_lengths(
                path, column, tokens_dtype, lambda n: bar.advance(task, n)
            )
    for each in written:
        console.print(
            f"{each.path}: {each.num_samples:,} samples, {each.num_tokens:,} tokens in "
            f"{each.num_shards:,} shards, column {each.column!r}",
            highlight=False,
            soft_wrap=True,
        )
