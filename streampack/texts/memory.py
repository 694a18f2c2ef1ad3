"""Rows in memory, written once per node into a file of the cache.

::

    lists, pandas    JSON lines: a conversation keeps the fields that it lacks
    pyarrow          Arrow IPC, as is a dataset of Hugging Face with indices or a table in memory
    other datasets   the files that they map, where they are

A file is known by its digest, which takes each process a pass over the rows; of a dataset of
Hugging Face it is the fingerprint. Its time of writing is 0, so that it is the same version on
every node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from streampack._extras import import_extra, is_from
from streampack._paths import replaced
from streampack.errors import ConfigError, DataError, short_text
from streampack.padding import PADDING_MASK
from streampack.texts.counts import file_lock
from streampack.texts.inputs.values import BadValueError, RowSelection
from streampack.texts.source_traits import is_one_shot

FOLDER = "rows"
BATCH_ROWS = 1000

logger = logging.getLogger(__name__)


def mapped_files(rows: Any) -> list[str] | None:
    """Return the files of a `datasets.Dataset` that has all their rows and no others, or None."""
    if not is_from(rows, "datasets", "Dataset") or rows._indices is not None:
        return None
    blocks = getattr(rows.data, "blocks", [[rows.data]])  # rows below each other, side by side
    tables = [table for block in blocks for table in block]
    is_plain = len(tables) == len(blocks) and all(
        hasattr(table, "path") and not table.replays for table in tables
    )
    paths = [table.path for table in tables] if is_plain else []
    is_kept = rows._format_type != "custom" and len(set(paths)) == len(paths) > 0
    return paths if is_kept else None


def write_memory(rows: Any, wanted: RowSelection, cache: Path) -> tuple[Path, str]:
    """Return the file of rows in memory, which is written if this node has none, and its digest.

    Raises:
        ConfigError: If they are of a kind that cannot be read twice.
        DataError: If there are none, or a value has no type in JSON.
    """
    if hasattr(rows, "__len__") and not len(rows):
        raise DataError(f"rows={short_text(rows)}: 0 rows; pass some, or omit the source")
    is_dataset = is_from(rows, "datasets", "Dataset")
    is_arrow = is_from(rows, "pyarrow", "Table")
    is_arrow |= is_dataset and rows._format_type != "custom"
    digest, num_bytes = hashlib.blake2b(repr(wanted).encode(), digest_size=16), 0
    if is_dataset:
        num_bytes = int(rows.data.nbytes)
        digest.update(f"{rows._fingerprint} {rows._format_type == 'custom'}".encode())
    elif is_arrow:
        for batch in _record_batches(rows):
            digest.update(batch.serialize())
            num_bytes += batch.nbytes
        digest.update(rows.schema.serialize())
    else:
        for line in _lines(rows, wanted):
            digest.update(line)
            num_bytes += len(line)
    name = digest.hexdigest()
    path = cache / FOLDER / name[:2] / f"{name}{'.arrow' if is_arrow else '.jsonl'}"
    size = None if is_dataset or is_arrow else num_bytes
    if not _is_whole(path, size):
        with file_lock(path, num_bytes):
            if not _is_whole(path, size):
                _write(rows, wanted, path)
    return path, name


def _is_whole(path: Path, num_bytes: int | None) -> bool:
    # A crash of the machine may leave a short file. One of Arrow cannot be read then.
    return path.exists() and num_bytes in (None, path.stat().st_size)


def _write(rows: Any, wanted: RowSelection, path: Path) -> None:
    logger.info("writing rows in memory to %s", path)
    with replaced(path) as temporary:
        if path.suffix == ".arrow":
            _write_arrow(rows, temporary)
        else:
            with temporary.open("wb") as file:
                file.writelines(_lines(rows, wanted))
        os.utime(temporary, (0, 0))


def _write_arrow(rows: Any, path: Path) -> None:
    ipc = import_extra("pyarrow.ipc", "tables", "a table in memory")
    batches = _record_batches(rows)
    first = next(batches)
    with ipc.new_file(str(path), first.schema) as writer:
        for batch in chain([first], batches):
            writer.write_batch(batch)


def _record_batches(rows: Any) -> Iterator[Any]:
    if is_from(rows, "pyarrow", "Table"):
        # A batch of a slice would be written with the whole buffers that it is a part of.
        yield from rows.combine_chunks().to_batches(BATCH_ROWS)
        return
    arrow = rows.with_format("arrow")
    for first in range(0, len(rows), BATCH_ROWS):
        yield from arrow[first : first + BATCH_ROWS].combine_chunks().to_batches()


def _lines(rows: Any, wanted: RowSelection) -> Iterator[bytes]:
    # A conversation may have any fields, and a transform reads all.
    is_narrow = wanted.option in ("text", "tokens")
    needed = {wanted.name, "input_ids", PADDING_MASK, *wanted.keep} if is_narrow else None
    for number, row in enumerate(chain.from_iterable(_batches(rows, wanted))):
        fields = row if isinstance(row, Mapping) else {wanted.name: row}
        if needed is not None:
            fields = {name: value for name, value in fields.items() if name in needed}
        yield _line(dict(fields), number)


def _line(fields: dict[str, Any], number: int) -> bytes:
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        try:
            return orjson.dumps(fields, default=_plain, option=option)
        except TypeError:  # half of a surrogate pair makes the row bad when it is read
            return f"{json.dumps(fields, default=_plain)}\n".encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"rows: row {number} has a value that JSON cannot represent ({error}); omit its "
            "column, or convert it to text, a number or a list"
        ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it is a {type(value).__name__}")


def _batches(rows: Any, wanted: RowSelection) -> Iterator[Sequence[Any]]:
    if is_from(rows, "datasets", "Dataset"):
        for first in range(0, len(rows), BATCH_ROWS):
            columns = rows[first : first + BATCH_ROWS]
            values = zip(*columns.values(), strict=True)
            yield [dict(zip(columns, row, strict=True)) for row in values]
    elif is_from(rows, "pandas", "DataFrame"):
        if not rows.columns.is_unique:  # only the last column of a name would be written
            try:
                rows = rows[wanted.columns_in(list(rows.columns))]
            except BadValueError as error:
                raise DataError(f"rows: {error}") from error
        for first in range(0, len(rows), BATCH_ROWS):
            yield rows.iloc[first : first + BATCH_ROWS].to_dict("records")
    elif isinstance(rows, Mapping) or is_one_shot(rows) or not hasattr(rows, "__len__"):
        raise ConfigError(
            f"rows={short_text(rows)} is not a list, a table, a datasets.Dataset or the path of a "
            "file; pass one split of a DatasetDict, make a list of a generator, or pass what has "
            "no end to PackedIterableDataset"
        )
    else:
        yield rows
