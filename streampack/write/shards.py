"""Writer of streams: MDS shards through MosaicML's writer, and their length file.

::

    samples --> OUT.x3k9.partial/shard.00000.mds.zstd ... index.json, lengths.bin --rename--> OUT

The folder gets its name once it is complete, so a killed process leaves no stream that only looks
complete. Each writer has its own partial folder, with a lock next to it that the kernel frees. The
next writer removes the folders of killed writers, but not those of live ones. Samples without
tokens are skipped and counted. zstd frames carry a checksum, so that a damaged one is refused even
if index.json has no hashes.

Cost: about 20 us a sample in MDSWriter, plus compression; 12 bytes of memory a sample.
"""

from __future__ import annotations

import shutil
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from filelock import FileLock, Timeout

from streampack._paths import local_path
from streampack.errors import ConfigError, DataError, suggest
from streampack.mds import mosaic
from streampack.mds.columns import DTYPES
from streampack.mds.index import parse_index
from streampack.mds.length_file import LENGTH_FILE, NO_TOKEN, write_length_file
from streampack.streams.column_selection import ColumnSelection
from streampack.types import IntArray

PARTIAL = ".partial"
LOCK = ".lock"
TYPES_OF_IDS = ("uint16", "int32", "uint32")  # suggested if the chosen dtype is too small
TARGETS = {"labels", "loss_mask"}  # names used by the docs and by ChatEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Summary of a written stream."""

    path: Path
    num_samples: int
    num_tokens: int
    num_shards: int
    num_skipped: int
    """Number of samples left out because they had no tokens."""
    num_without_targets: int
    """Number of samples whose `loss_mask` is all 0, so that nothing in them is learned."""


def write_stream(
    samples: Iterable[Any],
    out: Path,
    *,
    column: str = "tokens",
    dtype: str = "int32",
    compression: str | None = "zstd",
    size_limit: int | str | None = "64mb",
    hashes: Iterable[str] = ("xxh64",),
) -> Written:
    """Write samples as a stream, with a length file.

    Args:
        samples: Token ids of each sample, as a list or an array of shape (num_tokens,). Or a dict
            with the ids under `column` and more fields; the first sample determines the fields of
            all. Arrays, str, bytes and int keep their type. A list of one integer per token (a loss
            mask, labels) becomes an array. Everything else is stored as JSON.
        out: The stream's folder, on this machine; must be new or empty.
        column: Name of the token column; for the default, "input_ids" is accepted too.
        dtype: Type of the stored tokens; "uint16" suffices for vocabularies up to 65,536.
        compression: MosaicML's name of one, such as "zstd" or "zstd:7"; None: raw shards.
        size_limit: Bytes of a shard before compression, as a number or e.g. "64mb".
        hashes: Hash algorithms for index.json.

    Returns:
        A summary of the stream.

    Raises:
        ConfigError: If `out` is not empty or is a URL, or an argument is invalid.
        DataError: If there are no samples, or a sample has no integers, ids that do not fit, or
            other fields than the first.
    """
    out = _local_folder(out)
    if dtype not in DTYPES:
        raise ConfigError(
            f"dtype={dtype!r} is not one of {'|'.join(DTYPES)}{suggest(dtype, DTYPES)}"
        )
    hashes = sorted(hashes)
    _check_options(compression, hashes)
    options: dict[str, Any] = {
        "compression": compression,
        "size_limit": size_limit,
        "hashes": hashes,
    }
    with _partial_folder(out) as partial:
        options["out"] = str(partial)
        written = _StreamWriter(column, dtype, options).write_all(samples, partial, out)
        _give_name(partial, out)
    return Written(path=out, **written)


def _local_folder(out: Path) -> Path:
    out = local_path(
        out,
        "out",
        "name a folder, then upload it with the store's own tool, index.json last (aws s3 sync, "
        "for S3)",
    )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"out={str(out)!r} exists already and is not empty; remove it, or name another"
        )
    return out


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder next to `out` for this writer alone, and remove its remains."""
    _remove_remains(out)
    partial = out.with_name(f"{out.name}.{uuid.uuid4().hex}{PARTIAL}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{partial}{LOCK}")
    with lock:
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)


def _remove_remains(out: Path) -> None:
    """Remove folders of killed writers of `out`; a live one holds the lock next to its folder."""
    for file in out.parent.glob(f"{escape(out.name)}.*{PARTIAL}{LOCK}"):
        with suppress(Timeout), FileLock(file, timeout=0):
            shutil.rmtree(file.with_name(file.name.removesuffix(LOCK)), ignore_errors=True)
            file.unlink(missing_ok=True)


def _give_name(partial: Path, out: Path) -> None:
    try:
        # The rename replaces an empty folder, but not one that another writer has filled meanwhile.
        partial.rename(out)
    except OSError as error:
        raise ConfigError(
            f"out={str(out)!r} cannot become the stream's folder ({error.strerror}): something "
            "was put there during the write; remove it, or name another"
        ) from error


class _StreamWriter:
    """Feeds MDSWriter and records the lengths; the writer is created with the first sample."""

    def __init__(self, column: str, dtype: str, options: dict[str, Any]) -> None:
        self._column = column
        self._names = ColumnSelection(tokens=column).token_names
        self._lists: set[str] = set()
        self._dtype = np.dtype(dtype)
        # Labels are token ids or -100.
        self._list_dtype = np.promote_types(self._dtype, np.int32)
        self._options = options
        self._writer: Any = None
        self._lengths = array("I")
        self._edges = array("I")
        self._num_skipped = 0
        self._num_without_targets = 0

    def write_all(self, samples: Iterable[Any], folder: Path, out: Path) -> dict[str, int]:
        """Write samples, index.json and the length file; return the counts of `Written`.

        `out` is the final name of `folder`, for messages.
        """
        try:
            for number, sample in enumerate(samples):
                self._write(sample, number)
            if self._writer is None:
                raise DataError(
                    f"{out}: no sample to write ({self._num_skipped} without tokens); "
                    "a stream needs 1 or more"
                )
            self._writer.finish()
        except BaseException:
            if self._writer is not None:
                self._writer.cancel_future_jobs()
            raise
        text = (folder / mosaic.get_index_basename()).read_bytes()
        index = parse_index(text, str(out))
        lengths = np.frombuffer(self._lengths, np.uint32)
        edges = np.frombuffer(self._edges, np.uint32).reshape(-1, 2)
        write_length_file(folder / LENGTH_FILE, text, index, self._column, lengths, edges)
        return {
            "num_samples": len(lengths),
            "num_tokens": int(lengths.sum(dtype=np.int64)),
            "num_shards": len(index.shards),
            "num_skipped": self._num_skipped,
            "num_without_targets": self._num_without_targets,
        }

    def _write(self, sample: Any, number: int) -> None:
        row = dict(sample) if isinstance(sample, Mapping) else {self._column: sample}
        if self._writer is None:
            self._column = next((name for name in self._names if name in row), self._column)
        if self._column not in row:
            raise DataError(
                f"sample {number}: no {self._column!r}; it has {', '.join(map(repr, row))}; "
                "set column= to one of them"
            )
        tokens = _as_tokens(row[self._column], self._dtype, number)
        if len(tokens) == 0:
            self._num_skipped += 1
            return
        row[self._column] = tokens
        if self._writer is None:
            self._lists = {name for name in row if _is_per_token(row[name], len(tokens))}
        elif row.keys() != self._writer.columns.keys():
            # MDSWriter would silently drop a field without a column.
            raise DataError(
                f"sample {number}: has {', '.join(map(repr, row))}, but the first sample has "
                f"{', '.join(map(repr, self._writer.columns))}; give all samples the same fields"
            )
        like = np.empty(len(tokens), self._list_dtype)
        for name in self._lists:
            row[name] = _as_integers(row[name], name, like, number)
        _check_targets(row, tokens, number)
        if self._writer is None:
            columns = {name: _encoding_of(value) for name, value in row.items()}
            self._writer = _make_writer(columns, self._options)
        try:
            self._writer.write(row)
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(
                f"sample {number}: does not fit columns {self._writer.columns} "
                f"({type(error).__name__}: {error}); make all samples like the first"
            ) from error
        if "loss_mask" in row and not np.any(row["loss_mask"]):
            self._num_without_targets += 1
        self._lengths.append(len(tokens))
        self._edges.extend((int(tokens[0]), int(tokens[-1])))


class _ShardWriter(mosaic.MDSWriter):  # type: ignore[misc]
    """MosaicML's writer, with zstd frames that carry a checksum of their contents."""

    def _process_file(
        self, raw_data: bytes, raw_basename: str, zip_basename: str | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        family, _, level = (self.compression or "").partition(":")
        if family != "zstd" or zip_basename is None:
            whole: tuple[dict[str, Any], dict[str, Any] | None]
            whole = super()._process_file(raw_data, raw_basename, zip_basename)
            return whole
        compressor = zstandard.ZstdCompressor(level=int(level or 3), write_checksum=True)
        packed = compressor.compress(raw_data)
        Path(self.local, zip_basename).write_bytes(packed)
        return self._hash(raw_data, raw_basename), self._hash(packed, zip_basename)


def _check_options(compression: str | None, hashes: Iterable[str]) -> None:
    known = mosaic.get_compressions()
    if compression is not None and compression not in known:
        families = sorted({name.partition(":")[0] for name in known})
        raise ConfigError(
            f"compression={compression!r} is not one of {'|'.join(families)}, alone or with a "
            f"level that it has, as zstd:7{suggest(compression, families)}; None (on the command "
            "line: none) writes raw shards"
        )
    for name in hashes:
        if name not in mosaic.get_hashes():
            raise ConfigError(
                f"hashes: {name!r} is not one of {'|'.join(sorted(mosaic.get_hashes()))}"
                f"{suggest(name, mosaic.get_hashes())}"
            )


def _make_writer(columns: dict[str, str], options: dict[str, Any]) -> Any:
    size_limit = options["size_limit"]
    try:
        writer = _ShardWriter(columns=columns, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"MDSWriter refuses columns={columns}, size_limit={size_limit!r}: {error}"
        ) from error
    head_bytes = writer.extra_bytes_per_shard
    if writer.size_limit is not None and writer.size_limit <= head_bytes:
        raise ConfigError(
            f"size_limit={size_limit!r} (bytes) leaves no room for a sample after a shard's header "
            f"of {head_bytes} bytes: each would get its own shard; set a size such as '64mb'"
        )
    return writer


def _as_tokens(values: Any, dtype: np.dtype[Any], number: int) -> IntArray:
    tokens: npt.NDArray[Any] = np.asarray(values)
    if tokens.size == 0:
        return np.zeros(0, dtype)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"sample {number}: holds {tokens.dtype} of shape {tokens.shape}, but must be one row "
            "of integer token ids; tokenize it first"
        )
    least, most = int(tokens.min()), int(tokens.max())
    limits = np.iinfo(dtype)
    if least < 0 or most >= NO_TOKEN:
        raise DataError(
            f"sample {number}: token id {least if least < 0 else most}, but ids must be 0 to "
            f"{NO_TOKEN - 1}; write labels and masks in columns of their own"
        )
    if most > limits.max:
        fitting = next(name for name in TYPES_OF_IDS if most <= np.iinfo(name).max)
        raise DataError(
            f"sample {number}: token ids {least} to {most} do not fit {dtype} "
            f"(0 to {limits.max}); set dtype={fitting!r}"
        )
    return tokens.astype(dtype, copy=False)


def _is_per_token(value: Any, num_tokens: int) -> bool:
    """Return whether a field must be converted to an array of integers for MDS."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype == np.bool_ and value.shape == (num_tokens,))
    is_list = isinstance(value, (list, tuple)) and len(value) == num_tokens
    return is_list and all(isinstance(item, (int, np.integer, np.bool_)) for item in value)


def _as_integers(values: Any, name: str, like: IntArray, number: int) -> IntArray:
    """Return the integers of a field, with the shape and type of `like`."""
    limits = np.iinfo(like.dtype)
    with suppress(ValueError):  # raised for lists of unequal lengths
        array: npt.NDArray[Any] = np.asarray(values)
        is_fit = array.dtype.kind in "biu" and array.shape == like.shape
        if is_fit and limits.min <= array.min() and array.max() <= limits.max:
            return array.astype(like.dtype)
    raise DataError(
        f"sample {number}: {name!r} holds {repr(values)[:60]}, but as in the first sample it must "
        f"hold one integer of {limits.min} to {limits.max} for each of the {len(like)} tokens; "
        "fix it, or put it into a dict in all samples if it has another meaning"
    )


def _check_targets(row: Mapping[str, Any], tokens: IntArray, number: int) -> None:
    """Refuse labels and loss masks that `Stream(labels=..., loss_mask=...)` could not read."""
    for name in TARGETS & row.keys():
        value = row[name]
        is_array = isinstance(value, np.ndarray)
        if is_array and (value.dtype.name not in DTYPES or value.shape != tokens.shape):
            got = f"{value.dtype} of shape {value.shape}"
        elif isinstance(value, (list, tuple)):
            got = repr(value)[:60]
        else:
            continue
        raise DataError(
            f"sample {number}: {name!r} holds {got}, but must hold one integer for each of the "
            f"{len(tokens)} tokens; write it so, or under another name"
        )


def _encoding_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"ndarray:{value.dtype.name}"
    for kind, encoding in ((str, "str"), (bytes, "bytes"), (int, "int")):
        if isinstance(value, kind) and not isinstance(value, bool):
            return encoding
    return "json"
