"""Index token files: where their documents begin, their first and last tokens, and hashes.

::

    web.bin, web.idx        -->  out/web.bin.documents
    ... 7 9 2 | 4 4 1 2 | 5 ...    EOS is 2: documents end after it

For tokenizers whose EOS also occurs inside documents, an EOS counts only where the next token is
BOS. Tokens after the last EOS belong to no document, as OLMo has it.

Cost: one read of the tokens, and another one first to find each EOS; 20 bytes a document on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from streampack._checks import check_choice
from streampack._paths import replaced
from streampack.errors import ConfigError, DataError
from streampack.flat.documents import DOCUMENT, DOCUMENTS, HEAD, MAGIC, SHARD, VERSION
from streampack.flat.files import format_named
from streampack.flat.token_file import Ends, TokenFile
from streampack.mds.columns import Spans
from streampack.mds.length_file import NO_TOKEN
from streampack.storage.download import SLOWEST_BYTES_PER_S
from streampack.stores.retries import ATTEMPT_S, request
from streampack.streams.flat_opening import FoundFiles, find_files, open_found
from streampack.streams.stream import Stream
from streampack.write.lengths import edges_of

PIECE_BYTES = 32 << 20
SPLIT_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
Read = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTokens:
    """What was found in one token file."""

    name: str
    num_documents: int
    num_tokens: int
    """Tokens of its documents."""
    num_left: int
    """Tokens that belong to no document, which are not read."""


def stream_of(source: str | Sequence[str], **options: Any) -> Stream:
    """Return the stream of these files, on this machine or in a store."""
    is_remote = "://" in (source if isinstance(source, str) else source[0])
    options["remote" if is_remote else "local"] = source
    return Stream(**options)


def write_token_index(
    source: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - as of Stream
    tokens_dtype: str | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
) -> list[IndexedTokens]:
    """Write an index of token files into a folder, for `Stream(index=out)`.

    `source`, `format` and `tokens_dtype` are those of a `Stream`. A document ends after `eos_id`,
    where `bos_id` follows if it is given; without `eos_id`, documents are those of the files'
    tables. A ConfigError refuses a type or an id, a DataError a file without a document.
    """
    stream = stream_of(source, format=format, tokens_dtype=tokens_dtype)
    found = find_files(stream, None if format is None else format_named(format))
    if eos_id is None:
        return [_index_by_table(stream, found, name, Path(out)) for name in found.names]
    if found.form.name == "arrow":
        raise ConfigError(
            f"eos_id={eos_id}: other bytes are between the tokens of Arrow files, so these cannot "
            "be searched; write a stream, whose rows can be split: streampack write --tokens"
        )
    check_choice("tokens_dtype", tokens_dtype or "", SPLIT_DTYPES)
    dtype = np.dtype(tokens_dtype)
    for option, value in (("eos_id", eos_id), ("bos_id", bos_id)):
        if value is not None and not 0 <= value <= np.iinfo(dtype).max:
            raise ConfigError(f"{option}={value} does not fit in {tokens_dtype}; correct one")
    written = []
    for name in found.names:
        num_bytes = found.of_name[name].num_bytes
        pieces = _ends(_reader(found, name), num_bytes, dtype, (eos_id, bos_id))
        ends = np.concatenate([*pieces, np.empty(0, np.int64)])
        if not len(ends):
            raise DataError(
                f"{name}: none of its {num_bytes // dtype.itemsize} tokens of {tokens_dtype} is "
                f"the EOS {eos_id}; correct --eos-id or --tokens-dtype"
            )
        file = TokenFile(name=name, dtype=dtype.name, num_bytes=num_bytes, boundaries=Ends(ends))
        written.append(_index(found, file, eos_id + 1, Path(out)))
    return written


def _index_by_table(stream: Stream, found: FoundFiles, name: str, out: Path) -> IndexedTokens:
    """Write the index of a file with a table; of a store, an Arrow file is here meanwhile."""
    file, _ = open_found(stream, found, name)
    written = _index(found, file, 0, out)
    if found.form.name == "arrow" and found.folder is None and (copy := found.path_of(name)):
        copy.unlink()
    return written


def _index(found: FoundFiles, file: TokenFile, split: int, out: Path) -> IndexedTokens:
    path = out / f"{file.name}{DOCUMENTS}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary, temporary.open("wb") as opened:
        num_tokens = _write(opened, file, split, _reader(found, file.name))
    counts = {"num_tokens": num_tokens, "num_left": file.num_tokens - num_tokens}
    return IndexedTokens(name=file.name, num_documents=file.boundaries.num_samples, **counts)


def _write(out: BinaryIO, file: TokenFile, split: int, read: Read) -> int:
    num_documents, itemsize = file.boundaries.num_samples, np.dtype(file.dtype).itemsize
    shards = file.cut(0, num_documents)
    counts = (split, file.num_bytes, len(shards.extents), num_documents)
    hashes = np.zeros(len(shards.extents), SHARD)
    hashes["f0"], hashes["f1"] = shards.extents[:, 0], shards.extents[:, 1]
    out.write(HEAD.pack(MAGIC, VERSION, *counts, file.dtype.encode()))
    out.write(hashes.tobytes())
    num_tokens = 0
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
        hashes["f2"][number] = xxhash.xxh3_64_intdigest(data.data)
        num_tokens += int(lengths.sum())
    out.seek(HEAD.size)
    out.write(hashes.tobytes())
    return num_tokens


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
    path = found.path_of(name) if found.folder is not None or found.form.name == "arrow" else None
    url, version, _ = found.of_name[name]

    def _read(start: int, stop: int) -> bytes:
        if path is not None:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        limit_s = ATTEMPT_S + (stop - start) / SLOWEST_BYTES_PER_S
        return request(
            url,
            "read",
            lambda store: store.read(url, start, stop, version=version),
            attempt_s=limit_s,
        )

    return _read
