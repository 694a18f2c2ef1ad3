"""``streampack write INPUTS --out OUT``: turn text, rows or token ids into a stream.

::

    docs/ more.jsonl.zst --> OUT/job.json  OUT/parts/...  OUT/index.json  OUT/lengths.bin
    --warm run.yaml      --> the token shards of its texts (warm.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from streampack import write
from streampack.cli.console import counted, print_json, terminable
from streampack.cli.verbs import Merge, RowOptions, Write
from streampack.errors import ConfigError
from streampack.texts import RowFormat
from streampack.texts.rows import row_format

LINE_S = 30.0  # between lines of progress, where the output is not a terminal


def run_write(options: Write) -> None:
    """Write a stream, and print its size."""
    if (out := options.out) is None:
        raise ConfigError("is needed for a stream; set it to a new folder", option="out")
    console = Console(stderr=options.as_json)
    begin = time.monotonic()
    written = write_with_progress(options.inputs, out, _options(options), console)
    is_verified = options.verify and written.is_complete
    num_verified = write.verify(out) if is_verified else 0
    show_summary(
        written,
        as_json=options.as_json,
        seconds=time.monotonic() - begin,
        part=options.part,
        num_verified=num_verified,
    )


def refuse_stated(options: Any, names: Collection[str], why: str) -> None:
    """Refuse options of these names that were set."""
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise ConfigError(why, option=field.name)


def run_merge(options: Merge) -> None:
    """Write index.json and the length file, and print the stream's size."""
    written = write.merge(options.path, options.max_bad_rows)
    num_verified = write.verify(options.path) if options.verify else 0
    show_summary(written, as_json=options.as_json, num_verified=num_verified)


def _options(options: Write) -> write.WriteOptions:
    given = vars(options).copy()
    given["compression"] = None if options.compression == "none" else options.compression
    own = {f.name: given[f.name] for f in fields(write.WriteOptions) if f.name in given}
    return write.WriteOptions(rows=stated_format(options), **own)


def stated_format(options: RowOptions) -> RowFormat:
    """Return the format of rows that options say."""
    given = vars(options).copy()
    for name in ("columns", "context_roles", "ignore_fields"):
        given[name] = tuple(given.get(name) or ())
    given["template_kwargs"] = options.template_kwargs or {}
    given["chat_template"] = options.chat_template and options.chat_template.read_text()
    return row_format(SimpleNamespace(**given))


def write_with_progress(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: write.WriteOptions,
    console: Console,
) -> write.Written:
    """Write a stream, with a progress bar, or lines where the output is not a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    # In a file or a pipe, a transient bar would leave an empty line.
    bar = ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(os.path.basename(str(out).rstrip("/")), total=None, counts="")
    begin = last_line = time.monotonic()
    seen: list[write.Written] = []  # the first and the last

    def show(now: write.Written) -> None:
        nonlocal last_line
        seen[1:] = [now]
        seconds = time.monotonic() - begin
        counts = _counts(seen[0], now, seconds)
        bar.update(task, completed=now.num_bytes, total=now.total_bytes, counts=counts)
        if not console.is_terminal and begin + seconds - last_line >= LINE_S:
            last_line = begin + seconds
            num_bytes, num_left = now.num_bytes - seen[0].num_bytes, now.total_bytes - now.num_bytes
            left = f", {num_left * seconds / num_bytes / 60:,.0f} min left" if num_bytes else ""
            console.out(f"{out}: {counts}{left}", highlight=False)

    try:
        with bar, terminable():
            return write.write_texts(paths, out, options, show)
    except KeyboardInterrupt as interrupt:
        where = "nothing was written"
        if seen:
            where = f"{seen[-1].num_parts:,} of {seen[-1].total_parts:,} parts are done and kept"
            where += "; run the same command again for the others"
        interrupt.args = (f"{out}: {where}",)
        raise


def _counts(first: write.Written, now: write.Written, seconds: float) -> str:
    bad = f", {now.num_bad_rows:,} bad rows" if now.num_bad_rows else ""
    return (
        f"{now.num_parts:,} of {now.total_parts:,} parts, "
        f"{now.num_samples:,} rows, {now.num_tokens:,} tokens, "
        f"{(now.num_tokens - first.num_tokens) / max(seconds, 1e-9):,.0f} tokens/s{bad}"
    )


def show_summary(
    written: write.Written,
    *,
    as_json: bool,
    seconds: float | None = None,
    part: str | None = None,
    num_verified: int = 0,
) -> None:
    """Print the size of a stream, or of the parts that are done."""
    console = Console()
    if as_json:
        document = asdict(written) | {"path": str(written.path), "is_complete": written.is_complete}
        if seconds is not None:
            document["seconds"] = round(seconds, 3)
        if num_verified:
            document["num_verified"] = num_verified
        print_json(document)
        return
    lines = [f"{written.path}: {_sizes(written)}"]
    if not written.is_complete:
        lines = [
            f"{written.path}: {written.num_parts:,} of {written.total_parts:,} parts are done"
            f"{f', all of --part {part}' if part else ''}",
            f"when all are: streampack merge {written.path}",
        ]
    if num_verified:
        lines.append(f"{counted(num_verified, 'shard')} reread: all hashes are equal")
    lines += _about_special_tokens(written)
    for line in lines:
        console.out(line, highlight=False)


def _about_special_tokens(written: write.Written) -> list[str]:
    lines, facts = [], written.tokenizer
    if written.num_special_tokens:
        lines.append(
            f"{counted(written.num_special_tokens, 'special token')} spelled in texts became ids; "
            "--special-tokens text encodes them as text"
        )
    if facts and (facts["before"] or facts["after"]):
        template = " ".join([*facts["before"], "TEXT", *facts["after"]])
        lines.append(
            f"the tokenizer's template is {template}, and only TEXT was written: Packing(bos_id=, "
            f"eos_id=) adds BOS ({facts['bos_id']}) and EOS ({facts['eos_id']})"
        )
    return lines


def _sizes(written: write.Written) -> str:
    left_out = f", {written.num_skipped:,} without tokens skipped" if written.num_skipped else ""
    if written.num_dropped:
        left_out += f", {written.num_dropped:,} without a target skipped"
    if written.num_bad_rows:
        left_out += (
            f", {counted(written.num_bad_rows, 'bad row')} skipped (each part.json names its own)"
        )
    if written.num_without_targets:
        left_out += f", {written.num_without_targets:,} with a loss_mask of 0 throughout"
    return (
        f"{counted(written.num_samples, 'sample')}, {counted(written.num_tokens, 'token')} in "
        f"{counted(written.num_shards, 'shard')}{left_out}"
    )
