"""Whether a token file fits its table: where the tokens begin, and what follows the last document.

::

    table     0..5 5..9            9 tokens of documents, 2 after them: 18 % of the file
    tokens    aaaaabbbb..          up to 1 % are warned of, more are refused

A table of another file, or a wrong type of tokens, leaves a large part of a file unread.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from pathlib import Path

from streampack.errors import DataError
from streampack.flat.token_file import FoundFile, Options, TokenFile, VirtualShards

NUMPY_MAGIC = b"\x93NUMPY"
LLMC_MAGICS = (20240520, 20240801)
"""Of uint16 and of uint32 tokens."""
LLMC_BYTES = 1024
START_BYTES = 8
MAX_SHARE = 0.01
TAKE_THEM = "set trailing='ignore' if they are to be left unread"

logger = logging.getLogger(__name__)


def check_start(name: str, start: bytes) -> None:
    """Refuse a file with a DataError if its first `START_BYTES` are numpy's or llm.c's header."""
    if start.startswith(NUMPY_MAGIC) and name.endswith(".npy"):
        raise DataError(
            f"{name}: begins with a numpy header, which would be read as tokens; write the tokens "
            "without one: ndarray.tofile",
            uri=name,
        )
    magic, version = struct.unpack("<ii", start.ljust(START_BYTES, b"\0"))
    if magic in LLMC_MAGICS and version == 1:
        raise DataError(
            f"{name}: begins with llm.c's header of {LLMC_BYTES} bytes, which would be read as "
            f"tokens; write a copy without it: tail -c +{LLMC_BYTES + 1} {name} > COPY.bin",
            uri=name,
        )


def is_small(num_left: int, num_all: int) -> bool:
    """Return whether so much of a file may be left unread.

    >>> is_small(1, 100), is_small(2, 100), is_small(-1, 100)
    (True, False, False)
    """
    return 0 <= num_left <= MAX_SHARE * num_all


def check_end(path: Path, end: int, file: FoundFile, options: Options) -> None:
    """Refuse a table of a format whose files end with their last document, at the byte `end`.

    Raises:
        DataError: If the file is shorter, or longer and `TokenFiles(trailing=)` does not allow it.
    """
    if end > file.num_bytes or (end < file.num_bytes and not options.ignores_trailing):
        way_out = f", or {TAKE_THEM}" if end < file.num_bytes else ""
        raise DataError(
            f"{path}: its documents end at byte {end}, but {file.name} has {file.num_bytes} bytes; "
            f"they do not belong together, or one was cut short: copy both again{way_out}"
        )


def check_trailing(stream: str, opened: Iterable[tuple[TokenFile, VirtualShards]]) -> None:
    """Warn of the tokens after the last documents of a stream's files.

    Raises:
        DataError: If they are more than 1 % of a file.
    """
    num_left = num_all = 0
    for file, shards in opened:
        left = file.num_bytes - int(shards.extents[:, 1].max(initial=0))
        if not is_small(left, file.num_bytes):
            raise DataError(
                f"{file.name}: {left} of its {file.num_bytes} bytes ({left / file.num_bytes:.0%}) "
                "are tokens after the last document of its table; they do not belong together, or "
                f"one was cut short: copy both again, or {TAKE_THEM}",
                uri=file.name,
            )
        num_left, num_all = num_left + left, num_all + file.num_bytes
    if num_left:
        logger.warning(
            "stream %r: %d of the %d bytes of its files (%.2g %%) are tokens after the last "
            "document of a table, and are not read; set trailing='ignore' if that is right",
            stream,
            num_left,
            num_all,
            100 * num_left / num_all,
        )
