"""The counted pieces of files: kept in the cache, so that each version is counted once per node.

::

    CACHE/tables/3f/3f9c....npz     of the files that one source names, by name and version
    INDEX/rows.npz                  the same, written by `streampack index`, for lines of a store
    INDEX/lengths.npz               with its --tokenizer: the lengths of all samples
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock

from streampack._paths import is_url, local_path, replaced
from streampack._threads import ordered_thread_map
from streampack.errors import ConfigError
from streampack.storage.verify import as_data_error
from streampack.stores.retries import request
from streampack.texts.inputs.slices import InputSlice
from streampack.texts.inputs.values import RowSelection
from streampack.texts.units import LINES, ROWS, THREADS, count_file
from streampack.types import Int64Array

FOLDER = "tables"
INDEX_FILE = "rows.npz"
LENGTHS_FILE = "lengths.npz"
BYTES_OF_PIECE = 40
Known: TypeAlias = dict[str, tuple[str, Int64Array]]
"""Version and pieces by name."""

logger = logging.getLogger(__name__)


def count_files(
    inputs: Sequence[str],
    files: Sequence[InputSlice],
    wanted: RowSelection,
    cache: Path,
    index: str | os.PathLike[str] | None = None,
) -> dict[str, Int64Array]:
    """Return the pieces of files by name; those that the cache and the index lack are counted.

    Raises:
        ConfigError: If lines of a store are not counted yet.
        DataError: If a file cannot be read, or is damaged.
    """
    key = json.dumps([*inputs, wanted.option, wanted.name])
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    path = cache / FOLDER / name[:2] / f"{name}.npz"
    stated = {} if index is None else _decode(read_index(index))
    known = _read(path) | stated
    if _uncounted(files, known):
        with file_lock(path, BYTES_OF_PIECE * len(files)):  # at least
            known = _read(path) | stated
            uncounted = _uncounted(files, known)
            _refuse_stored_lines(uncounted, inputs)
            for file, pieces in zip(uncounted, _count(uncounted, wanted), strict=True):
                known[file.uri] = file.version, pieces
            with replaced(path) as temporary:
                temporary.write_bytes(as_npz(_arrays(files, [known[f.uri][1] for f in files])))
    return {file.uri: known[file.uri][1] for file in files}


def write_index(files: Sequence[InputSlice], out: str) -> list[int]:
    """Count files of lines, of stores too, write the counts to a folder or URL; return the rows."""
    pieces = _count(files, RowSelection("row", "text"))
    write_index_file(out, INDEX_FILE, _arrays(files, pieces))
    return [int(each[:, ROWS].sum()) for each in pieces]


def write_index_file(out: str, name: str, arrays: Mapping[str, Any]) -> None:
    """Write a file of an index, in place of an earlier one."""
    data = as_npz(arrays)
    if is_url(out):
        url = f"{out.rstrip('/')}/{name}"
        request(url, "written", lambda store: store.write(url, data), num_bytes=len(data))
        return
    folder = local_path(out, "out")
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / name) as temporary:
        temporary.write_bytes(data)


def as_npz(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as the bytes of a file of numpy."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # before numpy 2.1, `allow_pickle` would be one of the arrays
    return file.getvalue()


def read_npz(data: bytes) -> dict[str, Any] | None:
    """Return the arrays in the bytes of a file of numpy, or None if they are damaged."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)
    except (BadZipFile, EOFError, OSError, ValueError):
        return None


def _arrays(files: Sequence[InputSlice], pieces: Sequence[Int64Array]) -> dict[str, Any]:
    names = json.dumps([(file.uri, file.version) for file in files]).encode()
    return {
        "names": np.frombuffer(names, np.uint8),
        "counts": np.array(list(map(len, pieces)), np.int64),
        "pieces": np.concatenate([np.zeros((0, 5), np.int64), *pieces]),
    }


def _read(path: Path) -> Known:
    return _decode(path.read_bytes()) if path.exists() else {}


def _decode(data: bytes) -> Known:
    """Return the counts in a file; none if it is damaged: they are counted again."""
    arrays = read_npz(data) or {}
    try:
        names = json.loads(arrays["names"].tobytes())
        pieces = np.split(arrays["pieces"], np.cumsum(arrays["counts"])[:-1])
        return {uri: (version, own) for (uri, version), own in zip(names, pieces, strict=True)}
    except (KeyError, ValueError, TypeError):
        return {}


def _uncounted(files: Sequence[InputSlice], known: Known) -> list[InputSlice]:
    return [file for file in files if known.get(file.uri, ("",))[0] != file.version]


def _refuse_stored_lines(files: Sequence[InputSlice], inputs: Sequence[str]) -> None:
    file = next((file for file in files if file.format in LINES and is_url(file.uri)), None)
    if file is not None:
        raise ConfigError(
            f"{file.uri}: the rows of lines in a store are not known before they are counted; "
            f"count them once: streampack index {' '.join(inputs)} --out FOLDER, and set "
            "index=FOLDER"
        )


def _count(files: Sequence[InputSlice], wanted: RowSelection) -> list[Int64Array]:
    total = sum(file.num_bytes for file in files)
    logger.info("counting the rows of %d files, %d bytes", len(files), total)
    with progress_bar("counting rows", total) as show:
        count = partial(count_file, wanted=wanted, show=show)
        return list(ordered_thread_map(files, count, 2 * THREADS, THREADS))


@contextmanager
def file_lock(path: Path, num_bytes: int) -> Iterator[None]:
    """Hold the lock of a file of the cache that takes `num_bytes`; an OSError is a DataError."""
    with as_data_error(path, num_bytes, is_retried=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            yield


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal; yield what advances it by a number of bytes."""
    console = import_module("rich.console").Console(stderr=True)
    progress = import_module("rich.progress").Progress
    with progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield partial(bar.advance, bar.add_task(text, total=total))


def read_index(index: str | os.PathLike[str], name: str = INDEX_FILE) -> bytes:
    """Return the bytes of a file of an index; a ConfigError says that it has none."""
    path = f"{os.fspath(index).rstrip('/')}/{name}"
    if is_url(path):
        return request(path, "read", lambda store: store.read(path), way_out="check index=")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"index={index!r} has no {name} ({error.strerror}); name the folder that "
            "streampack index wrote, or omit it"
        ) from error
