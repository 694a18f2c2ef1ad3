"""Find where documents end in raw tokens, once, and keep the ends in a folder.

::

    part-0.npy: ... 7 9 2 | 4 4 1 2 | 5 ...    EOS is 2  -->  out/part-0.npy.ends: u64 end of each

Every end is the token after an EOS. For tokenizers whose EOS also occurs inside documents, an EOS
counts only where the next token is BOS. Tokens after the last EOS belong to no document, as OLMo
has it.

Cost: one pass over the tokens, which reads them; 8 bytes for each document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from streampack._checks import check_choice
from streampack.errors import ConfigError, DataError
from streampack.flat.files import ENDS, format_named
from streampack.stores.objects import Found
from streampack.stores.retries import request
from streampack.streams.flat_opening import find_files
from streampack.streams.stream import Stream

PIECE_BYTES = 32 << 20
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEnds:
    """What was found in one token file."""

    name: str
    num_documents: int
    num_tokens: int
    """Tokens of its documents."""
    num_left: int
    """Tokens after the last document, which are not read."""


def write_document_ends(
    source: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    tokens_dtype: str,
    eos_id: int,
    bos_id: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[DocumentEnds]:
    """Write the ends of documents in OLMo's `.npy` files, for `Stream(index=out)`.

    Args:
        source: The token files, as a `Stream` takes them in `local` or `remote`.
        out: A folder for the ends; it may be anywhere.
        tokens_dtype: The tokens' type, "uint16" or "uint32".
        eos_id: The token that ends a document.
        bos_id: The token that an EOS must be followed by to end a document. None: any.
        progress: Is called with the tokens of each piece.

    Raises:
        ConfigError: If the type or an id is invalid, or no token file is found.
        DataError: If a file cannot be read, or has no document.
    """
    check_choice("tokens_dtype", tokens_dtype, DTYPES)
    dtype = np.dtype(tokens_dtype)
    for option, value in (("eos_id", eos_id), ("bos_id", bos_id)):
        if value is not None and not 0 <= value <= np.iinfo(dtype).max:
            raise ConfigError(f"{option}={value} does not fit in {tokens_dtype}; correct one")
    is_remote = "://" in (source if isinstance(source, str) else source[0])
    remote, local = (source, None) if is_remote else (None, source)
    stream = Stream(remote=remote, local=local, format="olmo")
    found = find_files(stream, format_named("olmo"))
    written = []
    for name in found.names:
        path = Path(out, f"{name}{ENDS}")
        read = partial(_read_file, Path(found.of_name[name].url))
        if found.folder is None:
            read = partial(_read_object, found.of_name[name])
        num_tokens = found.of_name[name].num_bytes // dtype.itemsize
        pieces = list(_ends(read, num_tokens, dtype, (eos_id, bos_id), progress))
        ends = np.concatenate([*pieces, np.empty(0, np.int64)])
        if not len(ends):
            raise DataError(
                f"{name}: none of its {num_tokens} tokens of {tokens_dtype} is the EOS {eos_id}; "
                "correct --eos-id or --tokens-dtype"
            )
        _write_whole(path, ends)
        last = int(ends[-1])
        counts = {"num_tokens": last, "num_left": num_tokens - last}
        written.append(DocumentEnds(name=name, num_documents=len(ends), **counts))
    return written


def _ends(
    read: Callable[[int, int], bytes],
    num_tokens: int,
    dtype: np.dtype[np.generic],
    ids: tuple[int, int | None],
    progress: Callable[[int], object] | None,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ends of documents, piece by piece."""
    (eos_id, bos_id), size = ids, dtype.itemsize
    step = PIECE_BYTES // size
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
        if progress is not None:
            progress(stop - begin)


def _write_whole(path: Path, ends: npt.NDArray[np.int64]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(ends.astype("<u8").tobytes())
    temporary.replace(path)


def _read_file(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _read_object(found: Found, start: int, stop: int) -> bytes:
    url, version, _ = found
    return request(url, "read", lambda store: store.read(url, start, stop, version=version))
