"""The commit of a job: index.json and the length file, from what its parts say.

::

    parts/*/part.json    ------>  index.json      entries in the order of the input
    parts/*/samples.bin  ------>  lengths.bin

No shard is read or moved. The bytes are a function of the parts, so several processes may commit,
one at a time. In a store, it fails if the job was extended meanwhile.
The length file is written first: a reader that finds index.json may rely on everything else.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from streampack.errors import DataError
from streampack.mds.codecs import HASHES
from streampack.mds.encoder import index_json
from streampack.mds.index import INDEX_FILE, ShardFile, parse_index
from streampack.mds.length_file import LENGTH_FILE, length_file_pieces
from streampack.types import UInt32Array
from streampack.write.job import PART_FILE, PARTS, SAMPLES_FILE, Job, Part, read_job
from streampack.write.output import Output, open_output
from streampack.write.part import PartResult, read_result, shown_row
from streampack.write.samples import Counts

NUM_READERS = 16


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
    data = b"".join(length_file_pieces(text, index, job.settings.schema.column, lengths, edges))
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
            f"{output.url}: holds no {INDEX_FILE}: the stream is not finished; run the command "
            "that began it again, or `streampack merge` once all its parts are done"
        )
    index = parse_index(text, f"{output.url}/{INDEX_FILE}")
    damaged = []
    for shard in index.shards:
        fault = _fault(output, shard.stored)
        if fault:
            damaged.append(f"{shard.stored.basename} ({fault})")
    if damaged:
        raise DataError(
            f"{output.url}: {len(damaged)} of {len(index.shards)} shards are damaged: "
            f"{', '.join(damaged[:5])}{', ...' if len(damaged) > 5 else ''}; delete {PART_FILE} "
            "next to each of them, and run the command that wrote them again"
        )
    return len(index.shards)


def _why_empty(results: dict[str, PartResult]) -> str:
    """Return what became of the rows of a job without samples, and a way out."""
    counts = Counts.total(result.counts for result in results.values())
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
    """Return lengths of a part's samples, and their edges of shape (num_samples, 2)."""
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
