"""Arrow IPC files with a column of token lists, as `datasets` saves them: mapped, not decoded.

::

    state.json        "_data_files": [{"filename": "data-00000-of-00002.arrow"}, ...]
    *.arrow           IPC stream or file: record batches of offsets i32 or i64 [n + 1], and values

pyarrow locates the buffers of each record batch once. After that, offsets and values are read from
the mapped file, like those of any other format.

Cost: about 50 us for each record batch at opening.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streampack._extras import import_extra
from streampack.errors import DataError
from streampack.flat.mapped_tables import Table
from streampack.flat.token_file import FoundFile, Options, TokenFile
from streampack.padding import PADDING_MASK
from streampack.types import Int64Array

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FILE_MAGIC = b"ARROW1"
MAX_MASKS = 1000  # looked at in a file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowBatches:
    """The boundaries in the record batches of one file."""

    path: Path
    first_samples: Int64Array
    """The first row of each batch, and one past the last; shape (num_batches + 1,)."""
    offsets_at: Int64Array
    """Byte of each batch's offsets."""
    values_at: Int64Array
    """Token at which each batch's values begin, counted from the file's first byte."""
    offset_dtype: str
    num_bytes: int

    @property
    def num_samples(self) -> int:
        return int(self.first_samples[-1])

    def begins(self, samples: Int64Array) -> Int64Array:
        return self._offsets(samples, 0)

    def lengths(self, samples: Int64Array) -> Int64Array:
        return self._offsets(samples, 1) - self._offsets(samples, 0)

    def neighbours(self, first: int, stop: int) -> Int64Array:
        edges, width = self.first_samples, np.dtype(self.offset_dtype).itemsize
        low, high = np.searchsorted(edges, [first, stop - 1], "right").tolist()
        begins, ends = np.clip([edges[low - 1 : high], edges[low : high + 1]], first, stop)
        places = self.offsets_at[low - 1 : high] + (begins - edges[low - 1 : high]) * width
        counts = ends - begins + 1
        if (places + counts * width > self.num_bytes).any():
            return self.lengths(np.arange(first, stop))  # refuses them
        table = Table(path=self.path, dtype="u1", offset=0, count=self.num_bytes)
        data = table.view(0, self.num_bytes).data
        offsets = [
            np.ndarray(count, self.offset_dtype, data, place)
            for place, count in zip(places.tolist(), counts.tolist(), strict=True)
        ]
        return np.concatenate([each[1:] - each[:-1] for each in offsets]).astype(np.int64)

    def _offsets(self, samples: Int64Array, after: int) -> Int64Array:
        batches = np.searchsorted(self.first_samples, samples, "right") - 1
        width = np.dtype(self.offset_dtype).itemsize
        places = self.offsets_at[batches] + (samples - self.first_samples[batches] + after) * width
        data = Table(path=self.path, dtype="u1", offset=0, count=self.num_bytes)
        found = data.take(places[:, None] + np.arange(width)).view(self.offset_dtype)[:, 0]
        offsets: Int64Array = self.values_at[batches] + found
        return offsets


class Arrow:
    """`.arrow`, as `Dataset.save_to_disk` writes it."""

    name, suffix = "arrow", ".arrow"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        path = file.table(file.name)
        pa: Any = import_extra("pyarrow", "tables", f"{path}: reading an Arrow file")
        try:
            with pa.memory_map(str(path)) as mapped:
                base = mapped.read_buffer().address
                mapped.seek(0)
                is_file = mapped.read(len(FILE_MAGIC)) == FILE_MAGIC
                mapped.seek(0)
                reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
                column = _column_of(pa, reader.schema, options.tokens, path)
                numbers = range(reader.num_record_batches) if is_file else ()
                batches = map(reader.get_batch, numbers) if is_file else reader
                others = tuple(name for name in reader.schema.names if name != column.name)
                found: list[tuple[int, int, int]] = []
                for batch in batches:
                    if PADDING_MASK in others and not found:
                        _check_padding(batch.column(PADDING_MASK), path)
                    found.append(_buffers_of(batch.column(column.name), base, path))
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: is not a whole Arrow file ({error}); make a new copy"
            ) from error
        dtype = str(column.type.value_type)
        num_bytes, itemsize = path.stat().st_size, np.dtype(dtype).itemsize
        table = np.array([row for row in found if row[0]], np.int64).reshape(-1, 3)
        if (table[:, 1:] < 0).any() or (table[:, 1:] >= num_bytes).any():
            raise DataError(
                f"{path}: the buffers of column {column.name!r} are compressed, so they cannot be "
                "mapped; save it without compression, or write a stream: streampack write --tokens"
            )
        boundaries = ArrowBatches(
            path=path,
            first_samples=np.concatenate([[0], np.cumsum(table[:, 0])]),
            offsets_at=table[:, 1],
            values_at=table[:, 2] // itemsize,
            offset_dtype="<i8" if pa.types.is_large_list(column.type) else "<i4",
            num_bytes=num_bytes,
        )
        return TokenFile(
            name=file.name, dtype=dtype, num_bytes=num_bytes, boundaries=boundaries, columns=others
        )


def _check_padding(masks: Any, path: Path) -> None:
    values = masks.slice(0, MAX_MASKS)
    if hasattr(values, "flatten") and not np.asarray(values.flatten()).all():
        raise DataError(
            f"{path}: its {PADDING_MASK!r} has zeros, so rows are padded, and padding would be "
            "packed and learned; tokenize without padding, or write a stream: streampack write"
        )


def _column_of(pa: Any, schema: Any, columns: tuple[str, ...], path: Path) -> Any:
    name = next((each for each in columns if each in schema.names), None)
    if name is None:
        raise DataError(
            f"{path}: has the columns {', '.join(schema.names)}, none of them "
            f"{' or '.join(columns)}; set tokens= to the column of the token ids"
        )
    field = schema.field(name)
    is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
    if not is_list or str(field.type.value_type) not in DTYPES:
        raise DataError(
            f"{path}: column {name!r} has the type {field.type}, but token ids are lists of "
            f"{', '.join(DTYPES)}; set tokens= to another column, or write a stream: streampack "
            "write"
        )
    return field


def _buffers_of(array: Any, base: int, path: Path) -> tuple[int, int, int]:
    """Return the rows of a list array, and where its offsets and values begin in the file."""
    if array.null_count or array.values.null_count:
        raise DataError(f"{path}: some rows or tokens are null; drop them, and save it again")
    if not len(array):
        return 0, 0, 0
    buffers = array.buffers()
    offsets, values = buffers[1], buffers[3]
    # Without any token there may be no buffer of values, and nothing is read from it.
    at = offsets.address - base
    return len(array), at, at if values is None or not values.size else values.address - base
