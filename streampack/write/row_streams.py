"""Streams of rows: a list, a table, a dataset or a file, tokenized once into a cache of this node.

::

    Texts(rows, tokenizer)
        |  digest of the rows, the tokenizer's files, the options and the versions
        v
    CACHE/rows/1f3a9c...   exists --------------------------------------> Shards(local=...)
        '-- else, under its lock:  CACHE/rows/1f3a9c.x3k9.partial --rename--'

The writer of files writes the stream, so rows in memory first become JSON lines. Parts have numbers
as their names: index.json depends on the rows alone, and is the same on every node. A folder has
its name once it is complete; the next process that builds removes what a killed one left.

Cost: each process reads the rows for their digest, JSON lines at about 500 MB/s, and files at the
rate of the disk; of a dataset of Hugging Face it takes the fingerprint. Then the tokenizer's time
over all cores, once per node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from streampack._extras import installed, is_from
from streampack._paths import is_url
from streampack.config.held_out import HeldOut
from streampack.errors import BadRowsError, ConfigError, DataError, short_text
from streampack.mds.index import INDEX_FILE
from streampack.storage.filesystem import LocalFilesystem, private_root
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.rows import RowFormat, tokenizer_digest
from streampack.texts.source_traits import is_one_shot
from streampack.texts.tokenization import tokenizer_folder
from streampack.write.files import write_job
from streampack.write.job import JOB_FILE, Job, JobFile, Part, current_versions
from streampack.write.job_output import open_output
from streampack.write.options import OnBadRow, WriteOptions, Written
from streampack.write.plan import plan_job
from streampack.write.shards import LOCK, partial_folder

FOLDER = "rows"
ROWS_FILE = ".rows.jsonl"
PART_BYTES = 4 << 20  # of every node alike, as index.json depends on it
BATCH_ROWS = 1000
MAX_BAD_ROWS = 2**31  # all, where they may be omitted
COLUMN = "tokens"

logger = logging.getLogger(__name__)


def written_rows(
    rows: Any,
    row: Mapping[str, Any],
    *,
    local: str | os.PathLike[str] | None,
    on_bad_row: OnBadRow,
    split: HeldOut | None,
) -> Path:
    """Return the folder of the shards of rows, which are written if this node has none yet.

    `row` are options of a `RowFormat`, whose tokenizer may be in memory. Only the rows on the side
    of a `split` are written.

    Raises:
        ConfigError: If the rows are of a kind that cannot be read twice, or an option is invalid.
        DataError: If a row cannot become a sample, or a file cannot be read.
    """
    root = _root(local)
    with tempfile.TemporaryDirectory(prefix="streampack-tokenizer-") as temporary:
        tokenizer = tokenizer_folder(row.get("tokenizer"), Path(temporary))
        writes = WriteOptions(
            rows=RowFormat(**{**row, "tokenizer": tokenizer}),
            column=COLUMN,
            compression=None,
            part_bytes=PART_BYTES,
            split=split,
            on_bad_row=on_bad_row,
            max_bad_rows=MAX_BAD_ROWS,
        )
        folder = root / _digest(rows, writes)
        if not (folder / INDEX_FILE).exists():
            _build(rows, writes, folder)
    return folder


def _root(local: str | os.PathLike[str] | None) -> Path:
    if local is not None:
        root = Path(os.path.realpath(local))  # as the writer names its inputs
        root.mkdir(parents=True, exist_ok=True)
        return root
    try:
        root = Path(os.path.realpath(private_root()))
        LocalFilesystem().make_folder(root, is_private=True)
    except PermissionError as error:
        raise ConfigError(f"local=None: {error}; set local= or TMPDIR") from error
    (root / FOLDER).mkdir(exist_ok=True)
    return root / FOLDER


def _is_path(rows: Any) -> bool:
    return isinstance(rows, str | os.PathLike)


def _digest(rows: Any, writes: WriteOptions) -> str:
    digest, row = hashlib.blake2b(digest_size=12), writes.rows
    described = asdict(replace(row, tokenizer=None)), tokenizer_digest(row)
    versions = current_versions(row.backend), row.chat and installed("transformers")
    digest.update(json.dumps([described, versions, PART_BYTES, writes.on_bad_row]).encode())
    digest.update(b"" if writes.split is None else json.dumps(astuple(writes.split)).encode())
    if _is_path(rows):
        for file in list_inputs([os.fspath(rows)]):
            digest.update(json.dumps([file.format, file.compression, file.num_bytes]).encode())
            if is_url(file.uri):
                digest.update(file.version.encode())
                continue
            with open(file.uri, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "blake2b").digest())
    elif is_from(rows, "datasets", "Dataset"):
        digest.update(f"{rows._fingerprint} {rows._format_type}".encode())
    else:
        for line in _json_lines(rows, row):
            digest.update(line)
    return digest.hexdigest()


def _build(rows: Any, writes: WriteOptions, folder: Path) -> None:
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
            spilled = partial / ROWS_FILE
            if not _is_path(rows):
                with spilled.open("wb") as file:
                    file.writelines(_json_lines(rows, writes.rows))
            path = os.fspath(rows) if _is_path(rows) else str(spilled)
            try:
                written = _write(path, writes, partial)
            except BadRowsError as error:
                raise DataError(_in_rows(str(error), spilled)) from error
            spilled.unlink(missing_ok=True)
            partial.rename(folder)
    logger.info("%s: %d samples, %d tokens", folder, written.num_samples, written.num_tokens)
    if written.num_dropped or written.num_skipped or written.num_bad_rows:
        logger.warning(
            "omitted %d samples without a token to learn, %d without any token, and %d bad rows, "
            "of which each part.json in %s names the first ones",
            written.num_dropped,
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


def _write(path: str, options: WriteOptions, folder: Path) -> Written:
    output = open_output(folder)
    settings, slices = plan_job([path], options, None)
    parts = tuple(Part(id=f"{number:05}", slices=(one,)) for number, one in enumerate(slices))
    file = JobFile(settings=settings, versions=current_versions(options.rows.backend), parts=parts)
    output.put_new(JOB_FILE, file.encode())
    console = import_module("rich.console").Console(stderr=True)
    progress = import_module("rich.progress").Progress
    with progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=None)

        def show(progress: Written) -> None:
            bar.update(task, completed=progress.num_bytes, total=progress.total_bytes)

        return write_job(output, Job(files=(file,)), options, show)


def _json_lines(rows: Any, options: RowFormat) -> Iterator[bytes]:
    column = options.chat or (options.tokens if options.tokenizer is None else options.text)
    # A conversation may have more fields.
    needed = None if options.chat else {column, "input_ids", *options.columns}
    for number, row in enumerate(chain.from_iterable(_batches(rows))):
        fields = row if isinstance(row, Mapping) else {column: row}
        if needed is not None:
            fields = {name: value for name, value in fields.items() if name in needed}
        try:
            yield orjson.dumps(
                dict(fields),
                default=_plain,
                option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE,
            )
        except TypeError as error:  # JSONEncodeError is one
            raise DataError(
                f"rows: row {number} holds a value that JSON has no type for ({error}); leave its "
                "column out, or make it a text, a number or a list"
            ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it is a {type(value).__name__}")


def _batches(rows: Any) -> Iterator[Sequence[Any]]:
    if is_from(rows, "datasets", "Dataset"):
        plain = rows if rows._format_type == "custom" else rows.with_format(None)
        for first in range(0, len(rows), BATCH_ROWS):
            columns = plain[first : first + BATCH_ROWS]
            values = zip(*columns.values(), strict=True)
            yield [dict(zip(columns, row, strict=True)) for row in values]
    elif is_from(rows, "pandas", "DataFrame"):
        for first in range(0, len(rows), BATCH_ROWS):
            yield rows.iloc[first : first + BATCH_ROWS].to_dict("records")
    elif is_from(rows, "pyarrow", "Table"):
        for batch in rows.to_batches(BATCH_ROWS):
            yield batch.to_pylist()
    elif isinstance(rows, Mapping) or is_one_shot(rows) or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"rows={short_text(rows)} is not a list, a table, a datasets.Dataset or the path of a "
            "file; pass one split of a DatasetDict, make a list of a generator, or pass what has "
            "no end to PackedIterableDataset"
        )
    else:
        yield rows
