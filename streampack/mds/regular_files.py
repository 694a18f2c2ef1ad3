"""Opens files of a stream that are files: a pipe would block, and a device may have no end."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from streampack.errors import DataError


def check_file(path: Path) -> os.stat_result:
    """Refuse folders, pipes and devices: a pipe would block, and a device may have no end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "device")
        raise DataError(
            f"{path}: is a {kind}, not a file; remove it, or put the stream's file there"
        )
    return status


def open_file(path: Path) -> BufferedReader:
    """Open a file of a stream for reading; refuse folders, pipes and devices."""
    check_file(path)  # before it is opened, which waits if it is a pipe
    return path.open("rb")
