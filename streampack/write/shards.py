"""Writer of streams: MDS shards of any iterable of samples, and their length file.

::

    samples --> OUT.x3k9.partial/shard.00000.mds.zstd ... index.json, lengths.bin --rename--> OUT

The folder gets its name once it is complete, so a killed process leaves no stream that only looks
complete. Each writer has its own partial folder, with a lock next to it that the kernel frees. The
next writer removes the folders of killed writers, but not those of live ones. Samples without
tokens are skipped and counted. zstd frames carry a checksum, so that a damaged one is refused even
if index.json has no hashes.

Cost: about 10 us a sample, plus compression; two raw shards and 12 bytes a sample of memory.
"""

from __future__ import annotations

import os
import shutil
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from streampack._checks import check_choice
from streampack._paths import local_path, owned, remove_unowned
from streampack.errors import ConfigError, DataError
from streampack.mds.columns import DTYPES, token_names
from streampack.mds.encoder import EncodedShard, ShardEncoder, ShardLayout, index_json
from streampack.mds.index import INDEX_FILE, parse_index
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces, write_length_file
from streampack.texts.inputs.values import BadValueError
from streampack.texts.samples import SampleSchema
from streampack.texts.source_traits import as_array, check_not_table
from streampack.types import UInt32Array
from streampack.write.options import Written

PARTIAL = ".partial"
LOCK = ".lock"


@dataclass(slots=True)
class Counts:
    """What was read and written so far: see `Written`, which has the same numbers."""

    num_bytes: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_shards: int = 0
    num_skipped: int = 0
    num_without_targets: int = 0
    num_dropped: int = 0
    num_bad_rows: int = 0
    num_special_tokens: int = 0

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        return cls(*map(sum, zip(*map(astuple, counts), strict=True)))


class SampleWriter:
    """Puts samples into shards, and records their lengths and edges."""

    def __init__(
        self, schema: SampleSchema, layout: ShardLayout, put: Callable[[str, bytes], None]
    ) -> None:
        self.schema = schema
        self._encoder = ShardEncoder(layout)
        self._put = put  # writes a file of this name
        self._lengths = array("I")
        self._edges = array("I")
        self.counts = Counts()
        self.entries: list[dict[str, Any]] = []  # of index.json, one for each shard

    def add(self, sample: Mapping[str, Any]) -> None:
        """Write a sample that has tokens; a BadValueError says that it does not fit the columns."""
        try:
            shard = self._encoder.add(sample)
        except (TypeError, ValueError) as error:
            columns = dict(self.schema.columns)
            raise BadValueError(
                f"does not fit columns {columns} ({type(error).__name__}: {error})"
            ) from error
        self._keep(shard)  # not in the try: an error of the output is not one of the sample
        tokens = sample[self.schema.column]
        self._lengths.append(len(tokens))
        self._edges.extend((int(tokens[0]), int(tokens[-1])))
        self.counts.num_samples += 1
        self.counts.num_tokens += len(tokens)
        self.counts.num_without_targets += "loss_mask" in sample and not np.any(sample["loss_mask"])

    def finish(self) -> tuple[UInt32Array, UInt32Array]:
        """Write the last shard; return all lengths, and edges of shape (num_samples, 2)."""
        self._keep(self._encoder.finish())
        lengths, edges = (np.frombuffer(each, np.uint32) for each in (self._lengths, self._edges))
        return lengths, edges.reshape(-1, 2)

    def _keep(self, shard: EncodedShard | None) -> None:
        if shard is not None:
            self._put(shard.name, shard.data)
            self.entries.append(shard.entry)
            self.counts.num_shards += 1


def write_stream(
    samples: Iterable[Any],
    out: str | os.PathLike[str],
    *,
    tokens: str = "tokens",
    tokens_dtype: str = "int32",
    compression: str | None = "zstd",
    size_limit: int | str | None = "64mb",
    hashes: Iterable[str] = ("xxh64",),
) -> Written:
    """Write samples as a stream, with a length file.

    Args:
        samples: Token ids of each sample, as a list or an array of shape (num_tokens,). Or a dict
            with the ids under `tokens` and more fields; the first sample determines the fields of
            all. Arrays, tensors, str, bytes and int keep their type. A list of one integer per
            token (a loss mask, labels) becomes an array. Everything else is stored as JSON.
        out: The stream's folder, on this machine; must be new or empty.
        tokens: Name of the token column; for the default, "input_ids" is accepted too.
        tokens_dtype: Type of the stored ids; "uint16" suffices for vocabularies up to 65,536.
        compression: MosaicML's name of one, such as "zstd" or "zstd:7", or None for raw shards.
        size_limit: Bytes of a shard before compression, as a number or e.g. "64mb".
        hashes: Hash algorithms for index.json.

    Returns:
        A summary of the stream.

    Raises:
        ConfigError: If `out` is not empty or is a URL, or an argument is invalid.
        DataError: If there are no samples, or a sample has no integers, ids that do not fit, or
            other fields than the first.
    """
    check_not_table(samples, "samples")
    path = _local_folder(out)
    check_choice("tokens_dtype", tokens_dtype, DTYPES)
    layout = ShardLayout(
        columns={tokens: f"ndarray:{tokens_dtype}"},
        compression=compression,
        size_limit=size_limit,
        hashes=tuple(hashes),
    )
    with _partial_folder(path) as folder:
        return _write_all(samples, folder, path, layout, token_names(tokens))


def _local_folder(out: str | os.PathLike[str]) -> Path:
    path = local_path(
        out,
        "out",
        "name a folder, then upload it with the store's own tool, index.json last (aws s3 sync, "
        "for S3)",
    )
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"out={str(path)!r} exists already and is not empty; remove it, or name another"
        )
    return path


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """Yield a folder next to `out`, which gets its name at the end, or is removed on an error.

    Those of killed writers are removed first. A live one keeps the lock next to its folder.
    """
    for file in out.parent.glob(f"{escape(out.name)}.*{PARTIAL}{LOCK}"):
        remove_unowned(file, file.with_name(file.name.removesuffix(LOCK)))
    folder = out.with_name(f"{out.name}.{uuid.uuid4().hex}{PARTIAL}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with owned(Path(f"{folder}{LOCK}")):
        folder.mkdir()
        try:
            yield folder
            try:
                folder.rename(out)  # over an empty one, but not one that was filled meanwhile
            except OSError as error:
                raise ConfigError(
                    f"out={str(out)!r} cannot become the stream's folder ({error.strerror}): "
                    "something was put there during the write; remove it, or name another"
                ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write_all(
    samples: Iterable[Any], folder: Path, out: Path, layout: ShardLayout, names: Sequence[str]
) -> Written:
    writer: SampleWriter | None = None
    num_skipped = 0
    for number, sample in enumerate(samples):
        column = names[0] if writer is None else writer.schema.column
        row = dict(sample) if isinstance(sample, Mapping) else {column: sample}
        try:
            row = {name: as_array(value) for name, value in row.items()}
            schema = _schema_of(row, layout, names) if writer is None else writer.schema
            fitted = schema.fit(row)
        except (TypeError, ValueError) as error:
            raise DataError(f"sample {number}: {error}") from error
        if fitted is None:
            num_skipped += 1
            continue
        if writer is None:
            put = partial(_put, folder)
            writer = SampleWriter(schema, replace(layout, columns=schema.columns), put)
        try:
            writer.add(fitted)
        except BadValueError as error:
            way_out = "make all samples like the first"
            if not writer.counts.num_samples:
                way_out = "give arrays, texts, bytes, numbers, or values that JSON knows"
            raise DataError(f"sample {number}: {error}; {way_out}") from error
    if writer is None:
        raise DataError(
            f"{out}: no sample to write ({num_skipped} without tokens); a stream needs 1 or more"
        )
    lengths, edges = writer.finish()
    text = index_json(writer.entries)
    _put(folder, INDEX_FILE, text)
    pieces = length_file_pieces(
        text, parse_index(text, str(out)), writer.schema.column, lengths, edges
    )
    write_length_file(folder / LENGTH_FILE, pieces)
    return Written(**asdict(replace(writer.counts, num_skipped=num_skipped)), path=out)


def _schema_of(row: Mapping[str, Any], layout: ShardLayout, names: Sequence[str]) -> SampleSchema:
    dtype = layout.columns[names[0]].removeprefix("ndarray:")
    column = next((name for name in names if name in row), names[0])
    if column in row:
        return SampleSchema.of(row, column, dtype)
    return SampleSchema(column=column, dtype=dtype, columns={})


def _put(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
