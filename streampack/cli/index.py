"""``streampack index PATHS``: write length files, with hashes, for streams that have none.

::

    PATH/index.json, PATH/*/index.json  -->  a lengths.bin next to each
    s3://bucket/stream/index.json       -->  s3://bucket/stream/lengths.bin, uploaded

Cost: each stream is read once; shards are decompressed one at a time.
"""

from __future__ import annotations

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from streampack.cli.console import counted, output_console
from streampack.cli.verbs import Index
from streampack.write import Indexed, write_lengths


def run(options: Index) -> None:
    """Write the missing length files, and print a line for each."""
    console = output_console()
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} shards"), TimeElapsedColumn())
    written: list[Indexed] = []
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("shards", total=None)
        for path in options.paths:
            written += write_lengths(
                path,
                tokens=options.tokens,
                tokens_dtype=options.tokens_dtype,
                progress=lambda n: bar.advance(task, n),
                local=options.local,
                check_dtypes=options.check_dtypes,
            )
    for stream in written:
        console.out(
            f"{stream.path}: {counted(stream.num_samples, 'sample')}, "
            f"{counted(stream.num_tokens, 'token')} in {counted(stream.num_shards, 'shard')}, "
            f"column {stream.column!r}",
            highlight=False,
        )
