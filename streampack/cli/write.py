"""``streampack write PATHS --out FOLDER``: turn text, JSONL or token ids into a stream.

::

    docs/ more.jsonl.zst --> OUT/shard.00000.mds.zstd ...  index.json  lengths.bin

Cost: the tokenizer's, over all cores; see ``streampack.write``. That package is imported lazily, so
that the help page appears immediately.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from typer import Argument, Option

from streampack import write as room

NO_COMPRESSION = "none"


def write(  # noqa: PLR0913 - one option each
    paths: Annotated[
        list[Path],
        Argument(help="Text (.txt, .md), JSON lines (.jsonl, .json), plain, .gz or .zst; folders."),
    ],
    out: Annotated[Path, Option(help="The new stream's folder; must not hold anything.")],
    tokenizer: Annotated[
        Path | None, Option(help="A tokenizer.json; without it, rows hold token ids.")
    ] = None,
    text_field: Annotated[str, Option(help="JSONL field of the text.")] = "text",
    tokens_field: Annotated[
        str, Option(help="JSONL field of the token ids; input_ids is found too.")
    ] = "tokens",
    extra: Annotated[
        list[str] | None, Option(help="JSONL field of an integer per token, e.g. a loss mask.")
    ] = None,
    tokens: Annotated[str, Option(help="Column of the token ids.")] = "tokens",
    tokens_dtype: Annotated[
        str | None,
        Option(help="Integer type of the ids; by default the smallest that fits the tokenizer."),
    ] = None,
    compression: Annotated[str, Option(help="Such as zstd or zstd:7, or none.")] = "zstd",
    size_limit: Annotated[str, Option(help="Shard size before compression.")] = "64mb",
    processes: Annotated[
        int | None, Option(help="Processes that tokenize; default: cores.")
    ] = None,
) -> None:
    """Turn text, JSONL or token ids into a stream: MDS shards and a length file."""
    rows = room.RowFormat(
        tokenizer=tokenizer,
        text_field=text_field,
        tokens_field=tokens_field,
        extra_fields=tuple(extra or ()),
    )
    options = room.WriteOptions(
        rows=rows,
        column=tokens,
        dtype=tokens_dtype,
        compression=None if compression == NO_COMPRESSION else compression,
        size_limit=size_limit,
        num_processes=processes,
    )
    console = Console()
    files = room.list_files(paths)
    kinds = Counter(map(room.kind_of, files)).items()
    told = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds))
    console.print(f"reading {len(files):,} files: {told}", highlight=False, soft_wrap=True)
    try:
        written = write_with_bar(files, out, options, console)
    except KeyboardInterrupt:
        kept = f"{out} was not written, and its unfinished files were removed"
        raise KeyboardInterrupt(kept) from None
    skipped = f", {written.num_skipped:,} without tokens left out" if written.num_skipped else ""
    if written.num_without_targets:
        skipped += f", {written.num_without_targets:,} whose loss_mask is 0 throughout"
    console.print(
        f"{written.path}: {written.num_samples:,} samples, {written.num_tokens:,} tokens in "
        f"{written.num_shards:,} shards{skipped}",
        highlight=False,
        soft_wrap=True,
    )


def write_with_bar(
    paths: list[Path], out: Path, options: room.WriteOptions, console: Console
) -> room.Written:
    """Write a stream, with a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    # In a file or a pipe, a transient bar would leave an empty line.
    hidden = not console.is_terminal
    with ProgressBar(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(out.name, total=None)

        def show(progress: room.Progress) -> None:
            bar.update(
                task,
                completed=progress.num_bytes,
                total=progress.total_bytes,
                description=f"{out.name}: {progress.num_tokens:,} tokens",
            )

        return room.write_texts(paths, out, options, show)
