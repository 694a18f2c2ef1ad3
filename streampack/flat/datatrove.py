"""datatrove's `.ds` files, as nanotron reads them: tokens, and a file with the ends of documents.

::

    a.ds            u16 or u32 tokens, back to back
    a.ds.index      u64 end of each document, in tokens
    a.ds.metadata   line 1: tokenizer|bytes of a token          optional
    a.ds.loss       one byte a token, which is not read: refused
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from streampack.errors import DataError
from streampack.flat.token_file import Ends, Table, TokenFile

DTYPES = {2: "uint16", 4: "uint32"}
MAX_METADATA = 65_536


def open_datatrove(name: str, num_bytes: int, index: Path, metadata: Path | None) -> TokenFile:
    """Open the index of the tokens `name`, which have `num_bytes`.

    Raises:
        DataError: If the index does not fit the tokens, or their type is unknown.
    """
    size = index.stat().st_size
    if size % 8 or not size:
        raise DataError(
            f"{index}: has {size} bytes, but must have 8 for each document, of one or more; it is "
            "cut short: make a new copy"
        )
    ends = Table(path=index, dtype="<u8", offset=0, count=size // 8)
    last = int(ends[np.array([ends.count - 1])][0])
    itemsize = _stated_itemsize(metadata) or (num_bytes // last if last else 2)
    if itemsize not in DTYPES or last * itemsize != num_bytes:
        raise DataError(
            f"{index}: its documents end at token {last}, but {name} has {num_bytes} bytes, and a "
            "token has 2 or 4; they do not belong together, or one was cut short: copy both again"
        )
    dtype = DTYPES[itemsize]
    return TokenFile(name=name, dtype=dtype, num_bytes=num_bytes, boundaries=Ends(ends))


def _stated_itemsize(metadata: Path | None) -> int | None:
    """Return the bytes of a token that a `.ds.metadata` file states; None if it states none."""
    if metadata is None:
        return None
    with metadata.open("rb") as file:
        line = file.readline(MAX_METADATA)
    _, bar, number = line.decode(errors="replace").strip().rpartition("|")
    return int(number) if bar and number.isdecimal() else None
