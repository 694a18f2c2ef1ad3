"""Writing of files as a stream, in parts that can be resumed: what `streampack write` does.

::

    inputs --split--> slices --> job.json --> parts --engine--> part.json ... --commit--> index.json

The stream is a function of the input, the settings and the versions. It is the same, byte for byte,
for any number of processes, any engine, any order of the parts and any number of interruptions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from streampack._paths import shown_path
from streampack.errors import BadRowsError, ConfigError
from streampack.write.commit import commit, finished_parts
from streampack.write.engines import run_here, run_in_processes, run_on_ray
from streampack.write.job import Job, append_to_job, is_begun, read_job, start_job
from streampack.write.options import JobProgress, WriteOptions, Written
from streampack.write.output import Output, open_output
from streampack.write.part import Event, PartResult, PartTask
from streampack.write.plan import plan_job
from streampack.write.samples import Counts

SMALL_BYTES = 4 << 20  # written sooner than a second process could start


def write_texts(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: WriteOptions,
    progress: Callable[[JobProgress], None] | None = None,
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
    settings, slices = plan_job(inputs, options, None if known is None else known.settings)
    begin = append_to_job if options.append else start_job
    return write_job(output, begin(output, settings, slices), options, progress)


def write_job(
    output: Output,
    job: Job,
    options: WriteOptions,
    progress: Callable[[JobProgress], None] | None = None,
) -> Written:
    """Write what is missing of a job that was begun; see `write_texts`."""
    results = finished_parts(output, job)
    _write_missing(output, job, options, results, progress or (lambda _: None))
    if len(results) == len(job.parts):
        commit(output, job, results)
    return _summary(output, job, results)


def _check_place(output: Output, inputs: Sequence[str]) -> None:
    """Refuse an output inside an input folder: its files would be read as rows."""
    for one in inputs:
        folder = one if "://" in one else os.path.realpath(one)
        out = output.url if "://" in output.url else os.path.realpath(output.url)
        if out.startswith(folder.rstrip("/") + "/"):
            raise ConfigError(
                f"out={output.url!r} lies in the input {one}, so its files would be read as rows; "
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
            f"out={output.url!r} holds no job.json; name the folder that `streampack write` wrote "
            "to"
        )
    results = finished_parts(output, job)
    if max_bad_rows is not None:
        _check_budget(_counts_of(results), max_bad_rows, is_skipping=True)
    commit(output, job, results)
    return _summary(output, job, results)


def _write_missing(
    output: Output,
    job: Job,
    options: WriteOptions,
    results: dict[str, PartResult],
    progress: Callable[[JobProgress], None],
) -> None:
    """Write the parts of this share that are missing; add them to the results."""
    most = options.max_bad_rows if options.on_bad_row == "skip" else 0
    # Every n-th part, so that large and small files are spread over the shares.
    first, step = options.share
    parts = [(part, file.versions) for file in job.files for part in file.parts]
    tasks = [
        PartTask(
            output=output,
            settings=job.settings,
            versions=versions,
            part=part,
            rows=options.rows,
            max_bad_rows=most,
        )
        for part, versions in parts[first - 1 :: step]
        if part.id not in results
    ]
    total_bytes = sum(part.num_bytes for part in job.parts)
    before, running = _counts_of(results), dict[str, Counts]()

    def report(event: Event | None = None) -> None:
        """Show the progress, unless there are too many bad rows."""
        if event is not None:
            running[event.part_id] = event.counts
            if event.result is not None:
                results[event.part_id] = event.result
        counts = Counts.total([before, *running.values()])
        _check_budget(counts, most, is_skipping=most > 0)
        progress(
            JobProgress(
                num_bytes=counts.num_bytes,
                total_bytes=total_bytes,
                num_samples=counts.num_samples,
                num_tokens=counts.num_tokens,
                num_bad_rows=counts.num_bad_rows,
                num_parts=len(results),
                total_parts=len(job.parts),
            )
        )

    report()
    is_small = sum(task.part.num_bytes for task in tasks) < SMALL_BYTES
    num_workers = options.num_workers or (1 if is_small else os.cpu_count() or 1)
    if options.engine == "ray" and tasks:
        run_on_ray(tasks, options.num_workers, report)
    elif min(num_workers, len(tasks)) > 1:
        run_in_processes(tasks, min(num_workers, len(tasks)), report)
    else:
        run_here(tasks, report)


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


def _summary(output: Output, job: Job, results: dict[str, PartResult]) -> Written:
    counts = asdict(_counts_of(results))
    del counts["num_bytes"]
    is_url = output.url.startswith("s3://")
    return Written(
        **counts,
        path=output.url if is_url else Path(output.url),
        num_shards=sum(len(result.shards) for result in results.values()),
        tokenizer=job.settings.tokenizer_facts,
        num_parts=len(results),
        total_parts=len(job.parts),
    )
