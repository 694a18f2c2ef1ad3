"""``streampack write PATHS --out FOLDER``: turn text, JSONL or token ids into a stream.

::

    docs/ more.jsonl.zst --> OUT/shard.00000.mds.zstd ...  index.json  lengths.bin

Cost: the tokenizer's, over all cores; see ``streampack.write``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from streampack import write
from streampack.cli.verbs import Write

NO_COMPRESSION = "none"


def run(options: Write) -> None:
    """Write a stream, and print its size."""
    compression = None if options.compression == NO_COMPRESSION else options.compression
    write_options = write.WriteOptions(
        rows=write.RowFormat(
            tokenizer=options.tokenizer,
            text_field=options.text_field,
            tokens_field=options.tokens_field,
            extra_fields=tuple(options.extra or ()),
        ),
        column=options.tokens,
        dtype=options.tokens_dtype,
        compression=compression,
        size_limit=options.size_limit,
        num_processes=options.processes,
    )
    console = Console()
    files = write.list_files(options.paths)
    kinds = Counter(map(write.kind_of, files)).items()
    counts = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds))
    console.print(f"reading {len(files):,} files: {counts}", highlight=False, soft_wrap=True)
    try:
        written = write_with_bar(files, options.out, write_options, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{options.out} was not written, and its unfinished files were removed"
        ) from None
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
    paths: list[Path], out: Path, options: write.WriteOptions, console: Console
) -> write.Written:
    """Write a stream, with a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    # In a file or a pipe, a transient bar would leave an empty line.
    hidden = not console.is_terminal
    with ProgressBar(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(out.name, total=None)

        def _show(progress: write.Progress) -> None:
            bar.update(
                task,
                completed=progress.num_bytes,
                total=progress.total_bytes,
                description=f"{out.name}: {progress.num_tokens:,} tokens",
            )

        return write.write_texts(paths, out, options, _show)
