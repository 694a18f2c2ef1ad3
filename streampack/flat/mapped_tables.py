"""Tables of integers in files, which are mapped while they are read.

A table may have an entry for each of billions of documents, so only the entries that are asked for
are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from streampack.errors import DataError
from streampack.mds.regular_files import check_file
from streampack.storage.filesystem import map_file
from streampack.storage.verify import as_data_error
from streampack.types import ByteArray, Int64Array

MAX_VALUE = 2**62
"""Larger entries of a table are damage; arithmetic with them would overflow."""

_mapped: WeakValueDictionary[tuple[object, ...], ByteArray] = WeakValueDictionary()
_thread = threading.local()
"""The tables that this thread has mapped, by path, while it reads one file's documents."""


def map_shared(path: Path) -> ByteArray:
    """Map a file read-only; all virtual shards of it share one mapping. Shape (num_bytes,).

    Raises:
        DataError: If it cannot be read.
    """
    with as_data_error(path, is_retried=False):
        status = check_file(path)  # of the version that is there now
        key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
        data = _mapped.get(key)
        if data is None:
            data = _mapped[key] = map_file(path)
    return data


@contextmanager
def tables_mapped() -> Iterator[None]:
    """Map each table once until the outermost block ends: entries are read in small pieces."""
    outer = vars(_thread).get("tables")
    _thread.tables = {} if outer is None else outer
    try:
        yield
    finally:
        _thread.tables = outer


def map_table(path: Path) -> ByteArray:
    """Map a file of tables, or return the mapping of this thread's `tables_mapped`."""
    tables: dict[Path, ByteArray] | None = vars(_thread).get("tables")
    if tables is None:
        return map_shared(path)
    if path not in tables:
        tables[path] = map_shared(path)
    return tables[path]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """An array of integers inside a file, which is mapped while it is read."""

    path: Path
    dtype: str
    offset: int
    """Byte at which it begins; at any alignment."""
    count: int

    def __len__(self) -> int:
        return self.count

    def take(self, indices: Int64Array) -> npt.NDArray[Any]:
        """Return a copy of entries, in their own type.

        Raises:
            DataError: If an index is outside of the table, or the table is outside of the file.
        """
        # A negative index becomes a huge one.
        return self._mapped(indices.view(np.uint64).max(initial=0))[indices]

    def view(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Return the mapped entries [first, stop), one or more, in their own type.

        Raises:
            DataError: As `take`.
        """
        return self._mapped(stop - 1)[first:stop]

    def _mapped(self, last: int) -> npt.NDArray[Any]:
        """Return the mapped table, of which `last` is the last entry that is asked for."""
        data = map_table(self.path)
        end = self.offset + self.count * np.dtype(self.dtype).itemsize
        if end > len(data) or last >= max(self.count, 1):
            raise DataError(
                f"{self.path}: entry {last} of {self.count} is asked for, and the entries end at "
                f"byte {end} of {len(data)}; the file is cut short or damaged: make a new copy",
                uri=str(self.path),
            )
        return np.ndarray(self.count, self.dtype, data.data, self.offset)

    def __getitem__(self, indices: Int64Array) -> Int64Array:
        """Return entries as a copy of int64; errors as of `take`, or if one is too large."""
        values = self.take(indices)
        if values.dtype.kind == "u" and values.size and values.max() > MAX_VALUE:
            raise DataError(
                f"{self.path}: has the entry {values.max()}, which no file is long enough for; "
                "the file is damaged: make a new copy",
                uri=str(self.path),
            )
        return values.astype(np.int64)
