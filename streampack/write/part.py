"""Writing of one part: its shards, its samples' lengths, and last part.json.

::

    slices --read_rows--> batches --RowEncoder--> samples --ShardEncoder--> shard.00000.mds.zstd ...
                             '--> bad rows        lengths, edges  ------->  samples.bin
                                                  counts, hashes  ------->  part.json

A part is done when its part.json exists. It is written by one atomic step, after everything that it
names. A process that is killed before leaves files that the next one overwrites with equal bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import xxhash

from streampack.errors import BadRowsError, DataError
from streampack.mds.encoder import ShardLayout
from streampack.texts.inputs.read import read_rows, with_contents
from streampack.texts.inputs.slices import BadRow, InputSlice, RowBatch
from streampack.texts.inputs.values import BadValueError
from streampack.texts.rows import LOSS_MASK, RowEncoder
from streampack.texts.samples import SampleSchema
from streampack.texts.token_shard import OR_SKIP
from streampack.write.job import (
    PART_FILE,
    SAMPLES_FILE,
    Part,
    Settings,
    Versions,
    check_versions,
    setting,
)
from streampack.write.job_output import Output
from streampack.write.options import WriteOptions
from streampack.write.shards import Counts, SampleWriter

REPORT_S = 0.5
MAX_LISTED = 1000  # bad rows that a part.json names; all are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """What a process needs to write a part."""

    output: Output
    settings: Settings
    versions: Versions
    """The versions that must write it."""
    part: Part
    options: WriteOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The contents of a part.json."""

    id: str
    counts: Counts
    shards: list[dict[str, Any]]
    """Entries of index.json, with names inside the part's folder."""
    samples_hash: str
    """The xxh64 of samples.bin, in hex."""
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    """The first bad rows: uri, row, reason, and the byte after which rows are counted, if any."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, uri: str) -> PartResult:
        try:
            document = json.loads(data)
            counts = Counts(**document.pop("counts"))
            return cls(counts=counts, **document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{uri}: is damaged ({type(error).__name__}: {error}); delete it, and run the same "
                "command again: the part is then rewritten"
            ) from error


Event: TypeAlias = tuple[str, Counts, PartResult | None]
"""The id of a part, its counts so far, and its result, once it is done."""


def read_result(output: Output, part: Part) -> PartResult | None:
    """Return a part's result, or None if the part is not done."""
    name = f"{part.folder}/{PART_FILE}"
    data = output.read(name)
    return None if data is None else PartResult.decode(data, f"{output.url}/{name}")


def write_part(task: PartTask) -> Iterator[Event]:
    """Write a part, unless it is done; yield its counts twice a second, and last its result."""
    check_versions(task.output, task.versions, task.settings)
    done = read_result(task.output, task.part)
    if done is None:
        writer = _PartWriter(task)
        selection = task.options.rows.selection
        skips_damage, reported = task.options.on_bad_row == "skip", time.monotonic()
        for one, contents in with_contents(task.part.slices):
            before = writer.counts.num_bytes
            batches = read_rows(one, selection, contents=contents, skips_damage=skips_damage)
            for batch in batches:
                writer.add(batch, one)
                writer.counts.num_bytes = before + batch.num_bytes
                if time.monotonic() - reported >= REPORT_S:
                    yield task.part.id, replace(writer.counts), None
                    reported = time.monotonic()
            writer.counts.num_bytes = before + one.num_bytes
        done = writer.finish()
    yield task.part.id, done.counts, done


class _PartWriter:
    def __init__(self, task: PartTask) -> None:
        self._task = task
        schema = setting(SampleSchema, task.settings)
        self._rows = RowEncoder(task.options.rows, schema, task.settings["tokenizer"])
        self._samples = SampleWriter(schema, setting(ShardLayout, task.settings), self._put)
        self._bad_rows: list[dict[str, Any]] = []
        self.counts = self._samples.counts

    def add(self, batch: RowBatch, part: InputSlice) -> None:
        for bad in batch.bad:
            self._refuse(bad, part)
        encoded = self._rows.encode(batch)
        self.counts.num_special_tokens = self._rows.num_special_tokens
        for row, samples in zip(batch.rows, encoded, strict=True):
            try:
                if isinstance(samples, str):
                    raise BadValueError(samples)
                for sample in samples:
                    if sample is None:
                        self.counts.num_skipped += 1
                    elif self._rows.is_chat and not sample[LOSS_MASK].any():
                        self.counts.num_dropped += 1
                    else:
                        self._samples.add(sample)
            except BadValueError as error:
                any_value = "; set columns=NAME:json, in a new folder, to keep any value"
                reason = f"{error}{'' if isinstance(samples, str) else any_value}"
                self._refuse(BadRow(uri=part.uri, row=row, reason=reason), part)

    def finish(self) -> PartResult:
        """Write the last shard, the lengths, and part.json."""
        lengths, edges = self._samples.finish()
        data = lengths.tobytes() + edges.tobytes()
        self._put(SAMPLES_FILE, data)
        result = PartResult(
            id=self._task.part.id,
            counts=self.counts,
            shards=self._samples.entries,
            samples_hash=xxhash.xxh64_hexdigest(data),
            bad_rows=self._bad_rows,
        )
        self._put(PART_FILE, result.encode())  # over equal bytes, if another process was first
        return result

    def _put(self, name: str, data: bytes) -> None:
        self._task.output.put(f"{self._task.part.folder}/{name}", data)

    def _refuse(self, bad: BadRow, part: InputSlice) -> None:
        self.counts.num_bad_rows += 1
        described = asdict(bad)
        if part.format == "jsonl" and part.start:
            described["after_byte"] = part.start  # its number is counted from there
        if len(self._bad_rows) < MAX_LISTED:
            self._bad_rows.append(described)
        num_bad_rows, most = self.counts.num_bad_rows, self._task.options.most_bad_rows
        if num_bad_rows <= most:
            return
        where = shown_row(described)
        if most == 0:
            raise BadRowsError(f"{where}{OR_SKIP}")
        raise BadRowsError(
            f"{num_bad_rows} bad rows, but max_bad_rows={most}; the last one is {where}; set "
            f"max_bad_rows={10 * most} to allow more"
        )


def shown_row(bad: Mapping[str, Any]) -> str:
    """Return a bad row of a part.json as text.

    >>> shown_row({"uri": "a.jsonl", "row": 7, "after_byte": 500, "reason": "not valid JSON"})
    'a.jsonl, row 7 after byte 500: not valid JSON'
    """
    after = f" after byte {bad['after_byte']}" if "after_byte" in bad else ""
    return f"{bad['uri']}, row {bad['row']}{after}: {bad['reason']}"
