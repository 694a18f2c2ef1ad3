"""Streams of token lists: files, a list, a table or a dataset, written once into a cache.

::

    TokenFiles(rows)
        |  digest of the rows, the options and the versions
        v
    CACHE/rows/1f3a9c...   exists --------------------------------------> Shards(local=...)
        '-- else, under its lock:  CACHE/rows/1f3a9c.x3k9.partial --rename--'

The writer of files writes the stream, so rows in memory first become a file. Parts have numbers as
their names: index.json depends on the rows alone, and is the same on every node. A folder has its
name once it is complete; the next process that builds removes what a killed one left.

Cost: each process reads the rows for their digest, at the rate of the disk. Then they are written
over all cores, once per node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from streampack._paths import is_url
from streampack.errors import BadRowsError, DataError
from streampack.mds.index import INDEX_FILE
from streampack.storage.location import cache_root
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.values import RowSelection
from streampack.texts.memory import mapped_files, write_memory
from streampack.texts.rows import RowFormat
from streampack.write.files import write_job
from streampack.write.job import JOB_FILE, Job, JobFile, Part, current_versions
from streampack.write.job_output import open_output
from streampack.write.options import OnBadRow, WriteOptions, Written
from streampack.write.plan import plan_job
from streampack.write.shards import LOCK, partial_folder

FOLDER = "rows"
PART_BYTES = 4 << 20  # of every node alike, as index.json depends on it
MAX_BAD_ROWS = 2**31  # all, where they may be omitted
COLUMN = "tokens"

logger = logging.getLogger(__name__)


def written_rows(
    rows: Any,
    row: Mapping[str, Any],
    *,
    local: str | os.PathLike[str] | None,
    on_bad_row: OnBadRow,
) -> Path:
    """Return the folder of the shards of token lists, which are written if this node has none yet.

    `row` are options of a `RowFormat`.

    Raises:
        ConfigError: If the rows are of a kind that cannot be read twice, or an option is invalid.
        DataError: If a row cannot become a sample, or a file cannot be read.
    """
    root = cache_root(local, FOLDER)
    root.mkdir(parents=True, exist_ok=True)
    writes = WriteOptions(
        rows=RowFormat(**row),
        column=COLUMN,
        compression=None,
        part_bytes=PART_BYTES,
        on_bad_row=on_bad_row,
        max_bad_rows=MAX_BAD_ROWS,
    )
    paths = [os.fspath(rows)] if isinstance(rows, str | os.PathLike) else mapped_files(rows)
    memory = None
    if paths is None:
        wanted = RowSelection("tokens", writes.rows.tokens, tuple(writes.rows.kept))
        path, memory = write_memory(rows, wanted, root)
        paths = [str(path)]
    folder = root / _digest(memory, paths, writes)
    if not (folder / INDEX_FILE).exists():
        _build(paths, writes, folder, is_memory=memory is not None)
    return folder


def _digest(memory: str | None, paths: list[str], writes: WriteOptions) -> str:
    digest, row = hashlib.blake2b(digest_size=12), asdict(writes.rows)
    described = row, current_versions(writes.rows.backend), PART_BYTES, writes.on_bad_row, memory
    digest.update(json.dumps(described).encode())
    for file in list_inputs(paths) if memory is None else ():
        digest.update(json.dumps([file.format, file.compression, file.num_bytes]).encode())
        if is_url(file.uri):
            digest.update(file.version.encode())
            continue
        with open(file.uri, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def _build(paths: list[str], writes: WriteOptions, folder: Path, *, is_memory: bool) -> None:
    lock = FileLock(folder.with_suffix(LOCK))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for the process that writes %s", folder)
        held = lock.acquire()
    with held:
        if (folder / INDEX_FILE).exists():
            return
        with partial_folder(folder, of="*") as partial:
            try:
                written = _write(paths, writes, partial)
            except BadRowsError as error:
                text = _in_rows(str(error), Path(paths[0])) if is_memory else str(error)
                raise DataError(text) from error
            partial.rename(folder)
    logger.info("%s: %d samples, %d tokens", folder, written.num_samples, written.num_tokens)
    if written.num_skipped or written.num_bad_rows:
        logger.warning(
            "omitted %d samples without any token, and %d bad rows, of which each part.json in %s "
            "names the first ones",
            written.num_skipped,
            written.num_bad_rows,
            folder,
        )


def _in_rows(text: str, spilled: Path) -> str:
    found = re.match(rf"{re.escape(str(spilled))}, row (\d+)(?: after byte (\d+))?: ", text)
    if found is None:
        return text
    with spilled.open("rb") as file:
        before = file.read(int(found[2] or 0)).count(b"\n")
    return f"rows: row {int(found[1]) + before}: {text[found.end() :]}"


def _write(paths: list[str], options: WriteOptions, folder: Path) -> Written:
    output = open_output(folder)
    settings, slices = plan_job(paths, options, None)
    parts = tuple(Part(id=f"{number:05}", slices=(one,)) for number, one in enumerate(slices))
    file = JobFile(settings=settings, versions=current_versions(options.rows.backend), parts=parts)
    output.put_new(JOB_FILE, file.encode())
    console = import_module("rich.console").Console(stderr=True)
    progress = import_module("rich.progress").Progress
    with progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=None)

        def show(progress: Written) -> None:
            bar.update(task, completed=progress.num_bytes, total=progress.total_bytes)

        return write_job(output, Job(files=(file,)), options, show)
