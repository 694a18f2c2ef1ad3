"""``streampack index PATHS``: write length files, with hashes, for streams that have none.

::

    PATH/index.json, PATH/*/index.json  -->  a lengths.bin next to each
    s3://bucket/stream/index.json       -->  s3://bucket/stream/lengths.bin, uploaded
    --eos-id 2 --out ENDS *.npy         -->  ENDS/*.npy.ends

Cost: each stream is read once; shards are decompressed one at a time.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from streampack.cli.console import counted, output_console
from streampack.cli.verbs import Index
from streampack.errors import ConfigError
from streampack.write import Indexed, write_lengths
from streampack.write.document_ends import write_document_ends


def run(options: Index) -> None:
    """Write the missing length files, and print a line for each."""
    console = output_console()
    if options.eos_id is not None:
        _index_tokens(console, options)
        return
    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} shards"), TimeElapsedColumn())
    written: list[Indexed] = []
    given = vars(options).copy()
    for option in ("eos_id", "bos_id", "out"):
        if given.pop(option) is not None:
            raise ConfigError("is for token files; leave it out, or set --eos-id", option=option)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("shards", total=None)
        for path in given.pop("paths"):
            written += write_lengths(path, progress=lambda n: bar.advance(task, n), **given)
    for stream in written:
        console.out(
            f"{stream.path}: {counted(stream.num_samples, 'sample')}, "
            f"{counted(stream.num_tokens, 'token')} in {counted(stream.num_shards, 'shard')}, "
            f"column {stream.column!r}",
            highlight=False,
        )


def _index_tokens(console: Console, options: Index) -> None:
    """Write where documents end in raw token files."""
    for option in ("out", "tokens_dtype"):
        if getattr(options, option) is None:
            raise ConfigError("is needed with --eos-id; set it", option=option)
    sources = options.paths[0] if len(options.paths) == 1 else options.paths
    found = write_document_ends(
        sources,
        options.out or "",
        tokens_dtype=options.tokens_dtype or "",
        eos_id=options.eos_id or 0,
        bos_id=options.bos_id,
    )
    for file in found:
        console.out(
            f"{file.name}: {counted(file.num_documents, 'document')}, "
            f"{counted(file.num_tokens, 'token')}; {file.num_left:,} after the last one",
            highlight=False,
        )
