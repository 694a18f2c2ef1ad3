"""Writing of files as a stream, in parts that can be resumed: what `streampack write` does.

::

    files --cut--> units --> job.json --> parts --engine--> part.json ... --commit--> index.json

The stream is a function of the input, the settings and the versions. It is the same, byte for byte,
for any number of processes, any engine, any order of the parts and any number of interruptions.

A commit reads or moves no shard. Several processes may commit, one at a time; in a store, it fails
if the job was extended meanwhile. The length file is written first: a reader that finds index.json
may rely on everything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from streampack._checks import parse_share
from streampack._paths import real_path, shown_path
from streampack.errors import BadRowsError, ConfigError, DataError
from streampack.mds.codecs import HASHES
from streampack.mds.encoder import index_json
from streampack.mds.index import INDEX_FILE, ShardFile, parse_index
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces
from streampack.texts.units import uncounted_units
from streampack.types import UInt32Array
from streampack.write.engines import write_parts
from streampack.write.job import (
    PART_FILE,
    PARTS,
    SAMPLES_FILE,
    Job,
    Part,
    begin_job,
    is_begun,
    read_job,
)
from streampack.write.job_output import Output, open_output
from streampack.write.options import WriteOptions, Written
from streampack.write.part import Event, PartResult, PartTask, read_result, shown_row
from streampack.write.plan import plan_job
from streampack.write.shards import Counts

NUM_READERS = 16


def write_texts(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: WriteOptions,
    progress: Callable[[Written], None] = lambda _: None,
) -> Written:
    """Write files as one stream; if a former call was interrupted, only what is missing.

    Args:
        paths: Files, folders, globs and URLs, in order.
        out: The stream's folder or s3:// URL; new, empty, or of the same job.
        options: Formats, types, parts and processes.
        progress: Called about twice a second and process, and after each part.

    Returns:
        A summary of the stream, or with `part` of the parts that are done.

    Raises:
        BadRowsError: If there are more bad rows than may be omitted. Names one.
        ConfigError: If `out` contains anything else, the tokenizer cannot be loaded, or a text file
            has no tokenizer.
        DataError: If an input cannot be read, or the output cannot be written.
        WorkerError: If a worker process died.
    """
    output = open_output(out)
    inputs = [shown_path(path) for path in paths]
    _check_place(output, inputs)
    known = read_job(output) if is_begun(output) else None
    settings, files = plan_job(inputs, options, None if known is None else known.settings)
    cut = partial(
        uncounted_units,
        wanted=options.rows.selection,
        size=settings["part_bytes"],
        skips_damage=options.on_bad_row == "skip",
    )
    job = begin_job(output, settings, files, cut, append=options.append)
    return write_job(output, job, options, progress)


def write_job(
    output: Output,
    job: Job,
    options: WriteOptions,
    progress: Callable[[Written], None] = lambda _: None,
) -> Written:
    """Write what is missing of a job that was begun; see `write_texts`."""
    results, summary = finished_parts(output, job), _summary(output, job)
    # Every n-th part, so that large and small files are spread over the shares.
    share = parse_share(options.part or "1/1")
    parts = [(part, file.versions) for file in job.files for part in file.parts]
    common = partial(PartTask, output=output, settings=job.settings, options=options)
    tasks = [
        common(versions=versions, part=part)
        for part, versions in parts[share]
        if part.id not in results
    ]
    before, running = _counts_of(results), dict[str, Counts]()

    def report(event: Event | None = None) -> Written:
        """Show and return the progress, unless there are too many bad rows."""
        nonlocal before
        if event is not None:
            part_id, own, result = event
            running[part_id] = own
            if result is not None:
                results[part_id] = result
                before = Counts.total([before, running.pop(part_id)])
        counts = Counts.total([before, *running.values()])
        _check_budget(counts, options.most_bad_rows, is_skipping=options.on_bad_row == "skip")
        written = summary(counts, len(results))
        progress(written)
        return written

    written = report()
    with closing(write_parts(tasks, options)) as events:
        for event in events:
            written = report(event)
    if len(results) == len(job.parts):
        commit(output, job, results)
    return written


def _check_place(output: Output, inputs: Sequence[str]) -> None:
    """Refuse an output inside an input folder: its files would be read as rows."""
    for one in inputs:
        folder = one if "://" in one else real_path(one)
        out = output.url if "://" in output.url else real_path(output.url)
        if out.startswith(folder.rstrip("/") + "/"):
            raise ConfigError(
                f"out={output.url!r} is in the input {one}, so its files would be read as rows; "
                "name a folder outside of it"
            )


def merge(out: str | os.PathLike[str], max_bad_rows: int | None = None) -> Written:
    """Commit a job after several calls with `part` wrote its parts.

    Args:
        out: The stream's folder or s3:// URL.
        max_bad_rows: Number of bad rows that may have been skipped, or None for any.

    Raises:
        BadRowsError: If more were.
        ConfigError: If `out` has no job.
        DataError: If parts are missing, or cannot be read.
    """
    output = open_output(out)
    job = read_job(output)
    if job is None:
        raise ConfigError(
            f"out={output.url!r} has no job.json; name the folder that `streampack write` wrote to"
        )
    results = finished_parts(output, job)
    if max_bad_rows is not None:
        _check_budget(_counts_of(results), max_bad_rows, is_skipping=True)
    commit(output, job, results)
    return _summary(output, job)(_counts_of(results), len(results))


def _counts_of(results: dict[str, PartResult]) -> Counts:
    return Counts.total(result.counts for result in results.values())


def _check_budget(counts: Counts, most: int, *, is_skipping: bool) -> None:
    if counts.num_bad_rows > most:
        also = "" if is_skipping else "on_bad_row='skip' and "
        raise BadRowsError(
            f"{counts.num_bad_rows} bad rows in all parts, but {most} may be skipped; the "
            f"part.json of each part names them: fix them, or set {also}"
            f"max_bad_rows={10 * counts.num_bad_rows}"
        )


def _summary(output: Output, job: Job) -> Callable[[Counts, int], Written]:
    """Return what makes a summary of counts and a number of parts."""
    is_url = output.url.startswith("s3://")
    known = {
        "path": output.url if is_url else Path(output.url),
        "tokenizer": job.settings["tokenizer_facts"],
        "total_bytes": sum(part.num_bytes for part in job.parts),
        "total_parts": len(job.parts),
    }
    return lambda counts, num: Written(**asdict(counts), **known, num_parts=num)


def finished_parts(output: Output, job: Job) -> dict[str, PartResult]:
    """Return the results of the parts that are done, by part id."""
    names = set(output.names(f"{PARTS}/", f"/{PART_FILE}"))
    done = [part for part in job.parts if f"{part.folder}/{PART_FILE}" in names]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        results = pool.map(lambda part: read_result(output, part), done)
    return {result.id: result for result in results if result is not None}


def commit(output: Output, job: Job, results: dict[str, PartResult]) -> None:
    """Write the length file and index.json of a job; refuse one with missing or damaged parts."""
    num_missing = sum(part.id not in results for part in job.parts)
    if num_missing:
        raise DataError(
            f"{output.url}: {num_missing} of {len(job.parts)} parts are not done; run the command "
            "that began it again, for all parts and not a share: it writes what is missing"
        )
    entries = [
        _placed(entry, part.folder) for part in job.parts for entry in results[part.id].shards
    ]
    if not entries:
        raise DataError(f"{output.url}: no sample to write{_why_empty(results)}")
    text = index_json(entries)
    index = parse_index(text, output.url)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        read = pool.map(lambda part: _samples(output, part, results[part.id]), job.parts)
    lengths, edges = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
    data = b"".join(length_file_pieces(text, index, job.settings["column"], lengths, edges))
    with output.locked():
        # Samples that another command appended meanwhile would be lost.
        _check_current(output, job)
        # A commit that finds its own result writes nothing: readers would see a new version.
        if output.read(INDEX_FILE) != text or output.read(LENGTH_FILE) != data:
            output.put(LENGTH_FILE, data)
            output.put(INDEX_FILE, text)
            _check_current(output, job)  # a store has no locks
        output.clean_up(PARTS, lambda: {part.id for part in (read_job(output) or job).parts})


def _check_current(output: Output, job: Job) -> None:
    if read_job(output) != job:
        raise DataError(
            f"{output.url}: another command has replaced or extended this job meanwhile; run one "
            "of them again"
        )


def verify(out: str | os.PathLike[str]) -> int:
    """Read all shards of a stream again, and compare their sizes and hashes with index.json.

    Args:
        out: The stream's folder or s3:// URL.

    Returns:
        The number of shards.

    Raises:
        DataError: If the stream has no index.json, or a shard differs. Names all that do.
    """
    output = open_output(out)
    text = output.read(INDEX_FILE)
    if text is None:
        raise DataError(
            f"{output.url}: has no {INDEX_FILE}: the stream is not finished; run the command "
            "that began it again, or `streampack merge` once all its parts are done"
        )
    index = parse_index(text, f"{output.url}/{INDEX_FILE}")
    files = (shard.stored for shard in index.shards)
    damaged = [f"{file.basename} ({fault})" for file in files if (fault := _fault(output, file))]
    if damaged:
        raise DataError(
            f"{output.url}: {len(damaged)} of {len(index.shards)} shards are damaged: "
            f"{', '.join(damaged[:5])}{', ...' if len(damaged) > 5 else ''}; delete {PART_FILE} "
            "next to each of them, and run the command that wrote them again"
        )
    return len(index.shards)


def _why_empty(results: dict[str, PartResult]) -> str:
    counts = _counts_of(results)
    skipped = f"{counts.num_skipped} without tokens, {counts.num_dropped} with nothing to learn"
    if counts.num_dropped:
        return f" ({skipped}); raise max_seq_len, or give conversations with a response"
    if not counts.num_bad_rows:
        return f" ({skipped}); name files with 1 or more"
    bad = next(bad for result in results.values() for bad in result.bad_rows)
    return f" ({counts.num_bad_rows} bad rows, {skipped}); the first is {shown_row(bad)}"


def _placed(entry: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return an entry of index.json with names from the stream's folder on."""
    placed = dict(entry)
    for field in ("raw_data", "zip_data"):
        if file := entry[field]:
            placed[field] = file | {"basename": f"{folder}/{file['basename']}"}
    return placed


def _samples(output: Output, part: Part, result: PartResult) -> tuple[UInt32Array, UInt32Array]:
    name = f"{part.folder}/{SAMPLES_FILE}"
    data = output.read(name) or b""
    if xxhash.xxh64_hexdigest(data) != result.samples_hash:
        raise DataError(
            f"{output.url}/{name}: is missing or damaged ({len(data)} bytes); delete {PART_FILE} "
            "next to it, and run the command that began the job again"
        )
    lengths, edges = np.split(np.frombuffer(data, np.uint32), [result.counts.num_samples])
    return lengths, edges.reshape(-1, 2)


def _fault(output: Output, file: ShardFile) -> str:
    data = output.read(file.basename)
    if data is None:
        return "missing"
    if len(data) != file.num_bytes:
        return f"{len(data)} bytes, not {file.num_bytes}"
    for name, digest in file.hashes.items():
        if HASHES[name](data).hexdigest() != digest.lower():
            return f"another {name}"
    return ""
