"""Reading of a slice as batches of rows.

::

    InputSlice --place--> file --format--> RowBatch (256 rows) ... bad rows are listed in it

Bad rows are never raised. A damaged file, and one that is no longer the version that was listed,
are. A file that is written to while it is read is noticed by its time, not by its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from streampack._checks import read_count
from streampack.errors import DataError
from streampack.write.inputs.decompress import read_pieces
from streampack.write.inputs.lines import read_csv, read_jsonl, read_text
from streampack.write.inputs.locate import place_of
from streampack.write.inputs.slices import WHOLE, InputSlice, RowBatch, RowSelection
from streampack.write.inputs.tables import READERS
from streampack.write.inputs.values import Wanted

LINE_READERS: dict[
    str, Callable[[Iterable[bytes], InputSlice, Wanted, int], Iterator[RowBatch]]
] = {
    "jsonl": read_jsonl,
    "text": read_text,
    "markdown": read_text,
    "csv": read_csv,
}


def read_rows(
    slice_: InputSlice, selection: RowSelection, batch_rows: int = 256
) -> Iterator[RowBatch]:
    """Yield the rows of a slice in order; a batch has at most `batch_rows`, bad ones included.

    A row without a selected column, or with a value of another type, is a bad row. A file that is
    damaged, cut short or has changed since it was listed is a DataError. It names the file, and the
    byte where there is one. Without pyarrow, a table is a ConfigError.

    >>> from pathlib import Path
    >>> from streampack.write.inputs.split import split_inputs
    >>> path = Path(getfixture("tmp_path"), "rows.jsonl")
    >>> _ = path.write_text('{"text": "one"}\\n{"text": 2}\\n{"text": "three"}\\n')
    >>> [slice_] = split_inputs([str(path)], part_bytes=1024)
    >>> [batch] = read_rows(slice_, RowSelection(text="text"))
    >>> batch.values, batch.rows
    (['one', 'three'], [0, 2])
    >>> [(bad.row, bad.reason.split(",")[0]) for bad in batch.bad]
    [(1, "column 'text' is of type int")]
    """
    wanted = Wanted(selection)
    batch_rows = read_count("batch_rows", batch_rows)
    place, path = place_of(slice_.uri)
    is_lines = slice_.format in LINE_READERS
    stop = slice_.stop if is_lines else WHOLE
    with place.open(path, slice_.version, stop, is_sequential=is_lines) as opened:
        file = opened.file
        if is_lines:
            file.seek(slice_.start)
            pieces = read_pieces(file, slice_.uri, slice_.compression, slice_.num_bytes)
            batches = LINE_READERS[slice_.format](pieces, slice_, wanted, batch_rows)
        else:
            batches = READERS[slice_.format](file, slice_, wanted, batch_rows)
        try:
            for batch in batches:
                if is_lines:
                    batch.num_bytes = min(file.tell() - slice_.start, slice_.num_bytes)
                opened.check()
                yield batch
        except DataError:
            opened.check()  # a change of the file is a better explanation than damage
            raise
