"""Writing of one part: its shards, its samples' lengths, and last part.json.

::

    slices --read_rows--> batches --RowEncoder--> samples --ShardEncoder--> shard.00000.mds.zstd ...
                             '--> bad rows        lengths, edges  ------->  samples.bin
                                                  counts, hashes  ------->  part.json

A part is done when its part.json exists. It is written by one atomic step, after everything that it
names. A process that is killed before leaves files that the next one overwrites with equal bytes.

Cost: the tokenizer's time; the memory of two raw shards, and 12 bytes a sample.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from streampack.errors import BadRowsError, DataError
from streampack.mds.encoder import EncodedShard, ShardEncoder
from streampack.write.inputs.read import read_rows
from streampack.write.inputs.slices import BadRow, InputSlice, RowBatch
from streampack.write.job import (
    PART_FILE,
    SAMPLES_FILE,
    JobSettings,
    Part,
    Versions,
    check_versions,
)
from streampack.write.output import Output
from streampack.write.rows import RowEncoder, RowFormat
from streampack.write.samples import has_targets

MAX_LISTED = 1000  # bad rows that a part.json names; all are counted

UInt32Array = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """What a process needs to write a part."""

    output: Output
    settings: JobSettings
    versions: Versions
    """The versions that must write it."""
    part: Part
    rows: RowFormat
    """Where the tokenizer is on this machine."""
    max_bad_rows: int
    """Bad rows that may be skipped; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """What was read and written so far."""

    num_bytes: int = 0
    """Bytes of the input at rest that were read."""
    num_samples: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    """Samples without tokens."""
    num_without_targets: int = 0
    """Samples whose `loss_mask` is 0 throughout."""
    num_bad_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The contents of a part.json."""

    id: str
    versions: Versions
    """The versions that wrote the part."""
    counts: PartCounts
    shards: list[dict[str, Any]]
    """Entries of index.json, with names inside the part's folder."""
    samples_hash: str
    """The xxh64 of samples.bin, in hex."""
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    """The first bad rows: uri, row, reason, and the byte after which rows are counted, if any."""

    def encode(self) -> bytes:
        """Return the bytes of part.json."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, uri: str) -> PartResult:
        """Return the result of these bytes.

        Raises:
            DataError: If they are damaged.
        """
        try:
            document = json.loads(data)
            counts = PartCounts(**document.pop("counts"))
            return cls(counts=counts, **document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{uri}: is damaged ({type(error).__name__}: {error}); delete it, and run the same "
                "command again: the part is then written again"
            ) from error


Report = Callable[[PartCounts], None]


def read_result(output: Output, part: Part) -> PartResult | None:
    """Return a part's result; None: the part is not done.

    Raises:
        DataError: If its part.json is damaged.
    """
    name = f"{part.folder}/{PART_FILE}"
    data = output.read(name)
    return None if data is None else PartResult.decode(data, f"{output.url}/{name}")


def write_part(task: PartTask, report: Report) -> PartResult:
    """Write a part, unless it is done.

    Args:
        task: The part, and where it goes.
        report: Called with the counts so far, after each batch of rows.

    Returns:
        The contents of its part.json.

    Raises:
        BadRowsError: If it has more bad rows than it may.
        ConfigError: If the installed versions are not the job's.
        DataError: If the input cannot be read, or the output cannot be written.
        OSError: If the disk is full, for example.
    """
    check_versions(task.output, task.versions, task.settings.backend)
    done = read_result(task.output, task.part)
    if done is not None:
        return done
    writer = _PartWriter(task)
    for one in task.part.slices:
        for batch in read_rows(one, task.settings.selection):
            writer.add(batch, one)
            report(writer.counts(batch.num_bytes))
        writer.num_bytes += one.num_bytes
    return writer.finish()


class _PartWriter:
    """Encodes batches of rows, puts finished shards, and counts."""

    def __init__(self, task: PartTask) -> None:
        self._task = task
        self._schema = task.settings.schema
        self._rows = RowEncoder(task.rows, self._schema)
        self._encoder = ShardEncoder(task.settings.layout)
        self._shards: list[dict[str, Any]] = []
        self._lengths = array("I")
        self._edges = array("I")
        self._num_skipped = self._num_without_targets = self._num_bad_rows = 0
        self._num_tokens = 0
        self._bad_rows: list[dict[str, Any]] = []
        self.num_bytes = 0

    def add(self, batch: RowBatch, part: InputSlice) -> None:
        """Add a batch of rows; finished shards are written."""
        for bad in batch.bad:
            self._refuse(bad, part)
        samples = self._rows.encode(batch)
        for row, sample in zip(batch.rows, samples, strict=True):
            if sample is None:
                self._num_skipped += 1
            elif isinstance(sample, str):
                self._refuse(BadRow(uri=part.uri, row=row, reason=sample), part)
            else:
                try:
                    shard = self._encoder.add(sample)
                except (TypeError, ValueError) as error:
                    columns = dict(self._schema.columns)
                    reason = f"does not fit columns {columns} ({type(error).__name__}: {error})"
                    self._refuse(BadRow(uri=part.uri, row=row, reason=reason), part)
                    continue
                self._count(sample)
                self._put(shard)

    def counts(self, num_bytes: int) -> PartCounts:
        """Return the counts so far."""
        return PartCounts(
            num_bytes=self.num_bytes + num_bytes,
            num_samples=len(self._lengths),
            num_tokens=self._num_tokens,
            num_skipped=self._num_skipped,
            num_without_targets=self._num_without_targets,
            num_bad_rows=self._num_bad_rows,
        )

    def finish(self) -> PartResult:
        """Write the last shard, the lengths, and part.json."""
        task = self._task
        self._put(self._encoder.finish())
        data = self._lengths.tobytes() + self._edges.tobytes()
        task.output.put(f"{task.part.folder}/{SAMPLES_FILE}", data)
        result = PartResult(
            id=task.part.id,
            versions=task.versions,
            counts=self.counts(0),
            shards=self._shards,
            samples_hash=xxhash.xxh64_hexdigest(data),
            bad_rows=self._bad_rows,
        )
        name = f"{task.part.folder}/{PART_FILE}"
        if not task.output.put_new(name, result.encode()):
            # Another process wrote the same part meanwhile; its bytes are the same.
            return read_result(task.output, task.part) or result
        return result

    def _count(self, sample: Mapping[str, Any]) -> None:
        tokens = sample[self._schema.column]
        self._lengths.append(len(tokens))
        self._edges.extend((int(tokens[0]), int(tokens[-1])))
        self._num_tokens += len(tokens)
        self._num_without_targets += not has_targets(sample)

    def _put(self, shard: EncodedShard | None) -> None:
        if shard is not None:
            self._task.output.put(f"{self._task.part.folder}/{shard.name}", shard.data)
            self._shards.append(shard.entry)

    def _refuse(self, bad: BadRow, part: InputSlice) -> None:
        self._num_bad_rows += 1
        described = asdict(bad)
        if part.format == "jsonl" and part.start:
            described["after_byte"] = part.start  # its number is counted from there
        if len(self._bad_rows) < MAX_LISTED:
            self._bad_rows.append(described)
        check_bad_rows(self._num_bad_rows, self._task.max_bad_rows, described)


def shown_row(bad: Mapping[str, Any]) -> str:
    """Return a bad row of a part.json as text.

    >>> shown_row({"uri": "a.jsonl", "row": 7, "after_byte": 500, "reason": "not valid JSON"})
    'a.jsonl, row 7 after byte 500: not valid JSON'
    """
    after = f" after byte {bad['after_byte']}" if "after_byte" in bad else ""
    return f"{bad['uri']}, row {bad['row']}{after}: {bad['reason']}"


def check_bad_rows(num_bad_rows: int, most: int, bad: Mapping[str, Any]) -> None:
    """Refuse more bad rows than may be skipped.

    Args:
        num_bad_rows: Bad rows so far.
        most: Bad rows that may be skipped.
        bad: One of them: uri, row and reason.

    Raises:
        BadRowsError: If there are more.
    """
    if num_bad_rows <= most:
        return
    where = shown_row(bad)
    if most == 0:
        raise BadRowsError(f"{where}; set on_bad_row='skip' to leave such rows out")
    raise BadRowsError(
        f"{num_bad_rows} bad rows, but max_bad_rows={most}; the last one is {where}; set "
        f"max_bad_rows={10 * most} to leave more out"
    )


def parse_samples(data: bytes, num_samples: int) -> tuple[UInt32Array, UInt32Array]:
    """Return the lengths, and the first and last tokens, of a samples.bin.

    >>> lengths, edges = parse_samples(np.array([3, 2, 7, 9, 5, 5], np.uint32).tobytes(), 2)
    >>> lengths.tolist(), edges.tolist()
    ([3, 2], [[7, 9], [5, 5]])
    """
    values = np.frombuffer(data, np.uint32)
    return values[:num_samples], values[num_samples:].reshape(-1, 2)
