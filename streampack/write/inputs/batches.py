"""Collection of rows into batches."""

from __future__ import annotations

from typing import Any

from streampack.write.inputs.slices import BadRow, RowBatch
from streampack.write.inputs.values import BadValueError, Wanted

MAX_BATCH_BYTES = 8 << 20  # of rows at rest; a batch of long documents ends sooner


class BatchCollector:
    """Takes rows one at a time, and gives batches of them.

    Args:
        uri: The file of the rows.
        wanted: The columns to take.
        batch_rows: Number of rows, bad ones included, after which a batch is full.
    """

    def __init__(self, uri: str, wanted: Wanted, batch_rows: int) -> None:
        self._uri = uri
        self._wanted = wanted
        self._batch_rows = batch_rows
        self._batch = self._new()
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the batch should be taken."""
        batch = self._batch
        num_rows = len(batch.rows) + len(batch.bad)
        return num_rows >= self._batch_rows or self._num_bytes >= MAX_BATCH_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no row, not even a bad one."""
        return not self._batch.rows and not self._batch.bad

    def add(self, row: int, values: Any, num_bytes: int) -> None:
        """Add the columns of a row.

        Raises:
            BadValueError: If they lack a column, or one has another type.
        """
        value = self._wanted.value_in(values)
        kept = self._wanted.kept_in(values) if self._wanted.keep else ()
        self.add_value(row, value, num_bytes)
        for name, item in zip(self._wanted.keep, kept, strict=True):
            self._batch.kept[name].append(item)

    def add_value(self, row: int, value: Any, num_bytes: int) -> None:
        """Add the value of a row from which no column is kept."""
        self._batch.rows.append(row)
        self._batch.values.append(value)
        self._num_bytes += num_bytes

    def refuse(self, row: int, reason: str | BadValueError) -> None:
        """Add a bad row."""
        self._batch.bad.append(BadRow(self._uri, row, str(reason)))

    def take(self) -> RowBatch:
        """Return the batch, and begin another."""
        batch, self._batch, self._num_bytes = self._batch, self._new(), 0
        return batch

    def _new(self) -> RowBatch:
        return RowBatch(kept={name: [] for name in self._wanted.keep})
