"""datatrove's `.ds` files, as nanotron reads them: tokens, and a file with the ends of documents.

::

    a.ds            u16 or u32 tokens, back to back
    a.ds.index      u64 end of each document, in tokens
    a.ds.metadata   line 1: tokenizer|bytes of a token          optional
    a.ds.loss       u8 a token: 1 for a target               optional
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.flat.file_checks import check_end
from streampack.flat.mapped_tables import Table
from streampack.flat.token_file import Ends, FoundFile, Options, TokenFile

DTYPES = {2: "uint16", 4: "uint32"}
MAX_METADATA = 65_536


class Datatrove:
    """`.ds` with `.ds.index`."""

    name, suffix = "datatrove", ".ds"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        index = file.table(f"{file.name}.index", "write it with save_index=True")
        size = index.stat().st_size
        if size % 8 or not size:
            raise DataError(
                f"{index}: has {size} bytes, but must have 8 for each document, of one or more; it "
                "is cut short: make a new copy"
            )
        ends = Table(path=index, dtype="<u8", offset=0, count=size // 8)
        last = int(ends[np.array([ends.count - 1])][0])
        stated = _stated_itemsize(file.path_of(f"{file.name}.metadata"))
        if options.dtype is not None and stated is None:
            stated = np.dtype(options.dtype).itemsize
        if stated is None and options.ignores_trailing and file.num_bytes != 2 * last:
            raise DataError(
                f"{file.name}: has {file.num_bytes} bytes, of which documents have {last} tokens, "
                "and other tokens follow, so the sizes do not tell the type; set dtype='uint16' or "
                "'uint32', as the tokenizer's ids were written"
            )
        itemsize = stated or (file.num_bytes // last if last else 2)
        if itemsize not in DTYPES:
            raise DataError(
                f"{index}: its documents end at token {last}, but {file.name} has "
                f"{file.num_bytes} bytes, and a token has 2 or 4, not {itemsize}; they do not "
                "belong together, or one was cut short: copy both again"
            )
        check_end(index, last * itemsize, file, options)
        dtype = DTYPES[itemsize]
        return TokenFile(
            name=file.name, dtype=dtype, num_bytes=file.num_bytes, boundaries=Ends(ends)
        )


def _stated_itemsize(metadata: Path | None) -> int | None:
    if metadata is None:
        return None
    with metadata.open("rb") as file:
        line = file.readline(MAX_METADATA)
    _, bar, number = line.decode(errors="replace").strip().rpartition("|")
    return int(number) if bar and number.isdecimal() else None
