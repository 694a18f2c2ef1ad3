"""Index token files: where their documents begin, their first and last tokens, and hashes.

::

    web.bin, web.idx        -->  out/web.bin.documents
    ... 7 9 2 | 4 4 1 2 | 5 ...    EOS is 2: documents end after it, and where a row of a table ends

For tokenizers whose EOS also occurs inside documents, an EOS counts only where the next token is
BOS. Without a table, tokens after the last EOS belong to no document, as OLMo has it.

Cost: one read of the tokens, and another one first to find each EOS; 20 bytes a document on disk.
"""

from __future__ import annotations

import multiprocessing
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from streampack._checks import parse_share
from streampack._paths import local_path, replaced
from streampack.errors import ConfigError, DataError
from streampack.flat.documents import (
    DOCUMENT,
    DOCUMENTS,
    HEAD,
    MAGIC,
    SHARD,
    VERSION,
    open_documents,
)
from streampack.flat.file_checks import START_BYTES, check_start
from streampack.flat.olmo import DocumentTable
from streampack.flat.token_file import Ends, FoundFile, NoTableError, TokenFile
from streampack.index.lengths import edges_of
from streampack.mds.columns import Spans
from streampack.mds.dtype_check import MAX_BYTES, check_tokens_dtype
from streampack.mds.length_file import NO_TOKEN
from streampack.stores.retries import request
from streampack.streams.flat_opening import FoundFiles, find_files, open_found
from streampack.streams.flat_parts import with_masks
from streampack.streams.sources.token_files import TokenFiles

PIECE_BYTES = 32 << 20
LARGE_BYTES = 1 << 30
CHECKED_BYTES = 256 << 10
SPLIT_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
Read = Callable[[int, int], bytes]


class IndexedTokens(NamedTuple):
    """What was found in one token file: `num_left` tokens belong to no document."""

    name: str
    num_documents: int
    num_tokens: int
    num_left: int


def index_files(
    source: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    eos_id: int | None = None,
    bos_id: int | None = None,
    part: str = "1/1",
    resume: bool = False,
    num_workers: int | None = 1,
    **options: Any,
) -> Iterator[IndexedTokens]:
    """Write an index of token files into a folder, for `TokenFiles(index=...)`; yield each file.

    Documents are those of the files' tables. With `eos_id`, one also ends after this token, where
    `bos_id` follows if it is given; files without a table then have no other ends. `source` and the
    options, such as `format` and `dtype`, are those of `TokenFiles`, and `check_dtypes`. A
    ConfigError refuses a type or an id, a DataError a file without a document.

    `part` "2/8" is every eighth file from the second on, for several machines with one folder.
    With `resume`, files that an interrupted call finished are kept. With several `num_workers`,
    each indexes a file in a process of its own, which imports the caller's script; None is one for
    each core if the files are large.
    """
    checks_dtypes = options.pop("check_dtypes", True)
    files, folder = TokenFiles(source, **options), local_path(out, "out")
    found = find_files(files)
    names = list(found.names)[parse_share(part)]
    todo = [name for name in names if not (resume and _is_indexed(found, name, eos_id, folder))]
    yield from (_counts(found, name, folder) for name in sorted(set(names) - set(todo)))
    index_one = partial(_index_file, files, found, (eos_id, bos_id, checks_dtypes), folder)
    if num_workers is None:
        is_large = sum(found.file(name).num_bytes for name in todo) > LARGE_BYTES
        num_workers = (os.cpu_count() or 1) if is_large else 1
    if num_workers == 1 or len(todo) < 2:
        yield from map(index_one, todo)
        return
    # Not forked: a store's threads would not be copied.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(todo)), context) as pool:
        yield from pool.map(index_one, todo)


def _is_indexed(found: FoundFiles, name: str, eos_id: int | None, out: Path) -> bool:
    split = 0 if eos_id is None else eos_id + 1
    try:
        with (out / f"{name}{DOCUMENTS}").open("rb") as file:
            head = HEAD.unpack(file.read(HEAD.size))
    except (FileNotFoundError, struct.error):
        return False
    return head[:4] == (MAGIC, VERSION, split, found.file(name).num_bytes)


def _counts(found: FoundFiles, name: str, out: Path) -> IndexedTokens:
    file = open_documents(name, found.file(name).num_bytes, out, split_at=None)
    num_documents = file.boundaries.num_samples
    num_tokens = int(file.boundaries.lengths(np.arange(num_documents)).sum())
    # An Arrow file has other bytes between the tokens.
    num_left = 0 if found.form.name == "arrow" else file.num_tokens - num_tokens
    return IndexedTokens(name, num_documents, num_tokens, num_left)


def _index_file(
    files: TokenFiles,
    found: FoundFiles,
    options: tuple[int | None, int | None, bool],
    out: Path,
    name: str,
) -> IndexedTokens:
    """Write the index of a file; of a store, an Arrow file is on this disk meanwhile."""
    eos_id, bos_id, checks_dtypes = options
    listed, read = found.file(name), _reader(found, name)
    check_start(name, read(0, START_BYTES))
    try:
        file, has_table = open_found(files, found, name)[0], True
    except NoTableError:
        if eos_id is None:
            raise
        file = _without_table(listed, files.dtype, read, checks=checks_dtypes)
        has_table = False
    if eos_id is not None:
        file = _split(file, read, (eos_id, bos_id), has_table=has_table)
    [file] = with_masks([file], found.of_name)
    masks = None if file.mask is None else _reader(found, file.mask.name)
    path = out / f"{name}{DOCUMENTS}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary, temporary.open("wb") as opened:
        split = 0 if eos_id is None else eos_id + 1
        _write(opened, file, split, read, masks)
    if found.form.name == "arrow" and found.cache.is_remote and (copy := found.path_of(name)):
        copy.unlink()
    return _counts(found, name, out)


def _without_table(file: FoundFile, dtype: str | None, read: Read, *, checks: bool) -> TokenFile:
    """Return a file as one document, if its first values fit the type that was stated."""
    if dtype not in SPLIT_DTYPES:
        raise ConfigError(
            f"dtype={dtype}: {file.name} has no table, and the type of its tokens is in no "
            f"file; set it to one of {', '.join(SPLIT_DTYPES)}",
            option="dtype",
        )
    if checks:
        data = np.frombuffer(read(0, CHECKED_BYTES), np.uint8)
        begins = np.arange(0, len(data) - MAX_BYTES + 1, MAX_BYTES)
        check_tokens_dtype(data, begins, np.full(len(begins), MAX_BYTES), dtype, file.name)
    num_tokens = np.array([file.num_bytes // np.dtype(dtype).itemsize])
    return TokenFile(
        name=file.name, dtype=dtype, num_bytes=file.num_bytes, boundaries=Ends(num_tokens)
    )


def _split(
    rows: TokenFile, read: Read, ids: tuple[int, int | None], *, has_table: bool
) -> TokenFile:
    """Return the documents in the rows of a file: one ends at each EOS, and at the row's end."""
    dtype = np.dtype(rows.dtype)
    for option, value in zip(("eos_id", "bos_id"), ids, strict=True):
        if value is not None and not 0 <= value <= np.iinfo(dtype).max:
            raise ConfigError(f"{option}={value} does not fit in {dtype}; correct one")
    begins, lengths = rows.spans(0, rows.boundaries.num_samples)
    begins //= dtype.itemsize
    stops = begins + lengths
    pieces = _ends(read, rows.num_bytes, dtype, ids)
    ends = np.concatenate([*pieces, np.empty(0, np.int64)])
    # In a row, and not in other bytes between rows.
    row = np.searchsorted(begins, ends) - 1
    ends = ends[(row >= 0) & (ends <= stops[row])]
    if not len(ends):
        raise DataError(
            f"{rows.name}: none of its {lengths.sum()} tokens of {dtype} is the EOS {ids[0]}; "
            "correct --eos-id or --dtype"
        )
    if has_table:
        ends = np.union1d(ends, stops[lengths > 0])
    starts = np.maximum(begins[np.searchsorted(begins, ends) - 1], np.append(0, ends[:-1]))
    return replace(rows, boundaries=DocumentTable(starts, ends))


def _write(out: BinaryIO, file: TokenFile, split: int, read: Read, masks: Read | None) -> None:
    num_documents, itemsize = file.boundaries.num_samples, np.dtype(file.dtype).itemsize
    shards = file.cut(0, num_documents)
    counts = (split, file.num_bytes, len(shards.extents), num_documents)
    hashes = np.zeros(len(shards.extents), SHARD)
    hashes["f0"], hashes["f1"] = shards.extents[:, 0], shards.extents[:, 1]
    out.write(HEAD.pack(MAGIC, VERSION, *counts, file.dtype.encode()))
    out.write(hashes.tobytes())
    for number, (first, end) in enumerate(pairwise(shards.first_sample.tolist())):
        start, stop = shards.extents[number].tolist()
        data = np.frombuffer(read(start, stop), np.uint8)
        if len(data) != stop - start:
            raise DataError(f"{file.name}: was cut short while it was read; make a new copy")
        begins, lengths = file.spans(first, end)
        if lengths.max() >= NO_TOKEN:
            raise DataError(f"{file.name}: a document has {lengths.max()} tokens; split it")
        spans = Spans(begins=begins - start, counts=lengths, dtype=file.dtype)
        edges = edges_of(data, spans, file.name)
        rows = np.empty(end - first, DOCUMENT)
        rows["f0"], rows["f1"] = begins // itemsize, lengths
        rows["f2"], rows["f3"] = edges[:, 0], edges[:, 1]
        out.write(rows.tobytes())
        content = xxhash.xxh3_64(data.data)
        if masks is not None:
            content.update(masks(start // itemsize, stop // itemsize))
        hashes["f2"][number] = content.intdigest()
    out.seek(HEAD.size)
    out.write(hashes.tobytes())


def _ends(
    read: Read,
    num_bytes: int,
    dtype: np.dtype[np.generic],
    ids: tuple[int, int | None],
) -> Iterator[npt.NDArray[np.int64]]:
    (eos_id, bos_id), size = ids, dtype.itemsize
    step, num_tokens = PIECE_BYTES // size, num_bytes // size
    for begin in range(0, num_tokens, step):
        stop = min(begin + step, num_tokens)
        # One token more: whether an EOS at the end of a piece is followed by BOS.
        tokens = np.frombuffer(read(begin * size, min(stop + 1, num_tokens) * size), dtype)
        is_end = tokens[: stop - begin] == eos_id
        if bos_id is not None:
            follows = np.ones(stop - begin, bool)  # the file's last token may end a document
            after = tokens[1 : stop - begin + 1]
            follows[: len(after)] = after == bos_id
            is_end &= follows
        yield np.flatnonzero(is_end) + begin + 1


def _reader(found: FoundFiles, name: str) -> Read:
    is_here = not found.cache.is_remote or found.form.name == "arrow"
    path = found.path_of(name) if is_here else None
    url, version, _ = found.of_name[name]

    def _read(start: int, stop: int) -> bytes:
        if path is not None:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        return request(
            url,
            "read",
            lambda store: store.read(url, start, stop, version=version),
            num_bytes=stop - start,
        )

    return _read
