"""The description of a job: what its parts are, and everything that their bytes depend on.

::

    job.json         settings, versions, parts 0 1 2     written first, never changed
    job.00001.json   the same settings, parts 3 4        one more for each --append
    parts/<id>/      of each part: shards, samples.bin, and last part.json

A part is one slice of the input, or several small neighbours of it. Its id is a hash of the slices
and of the settings. So every process that writes a part writes the same bytes to the same names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias, TypeVar, cast

import streampack
from streampack._extras import installed
from streampack.errors import ConfigError, DataError
from streampack.mds.index import INDEX_FILE
from streampack.texts.inputs.slices import InputSlice
from streampack.write.job_output import Output

JOB_FILE = "job.json"
PARTS = "parts"
PART_FILE = "part.json"
SAMPLES_FILE = "samples.bin"
JOB_VERSION = 5
LIBRARIES = ("tokenizers", "zstandard")
Versions: TypeAlias = dict[str, str | None]
ANOTHER = "repeat the command that began it, or name another folder"
ENCODING = (
    *("special_tokens", "backend", "train_on", "chat_template", "max_seq_len"),
    *("template_kwargs", "context_roles", "ignore_fields"),
)
Settings: TypeAlias = dict[str, Any]
"""Everything but the input that the bytes of parts depend on, as JSON has it: the fields of
`SampleSchema`, `ShardLayout` and `RowSelection`, the options in `ENCODING`, `part_bytes`, and the
`tokenizer` as a digest and as `tokenizer_facts`, which are those of `Written.tokenizer`."""

T = TypeVar("T")


def setting(kind: type[T], settings: Settings) -> T:
    """Return the `SampleSchema`, `ShardLayout` or `RowSelection` of settings."""
    return kind(**{each.name: settings[each.name] for each in fields(cast("Any", kind))})


def compared(settings: Settings) -> Settings:
    """Return settings without those that may differ: a path may be spelled in several ways."""
    return {name: value for name, value in settings.items() if name != "tokenizer_facts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A share of the input that is written, and finished, by itself."""

    id: str
    slices: tuple[InputSlice, ...]

    @property
    def folder(self) -> str:
        return f"{PARTS}/{self.id}"

    @property
    def num_bytes(self) -> int:
        """Bytes of its input at rest."""
        return sum(part.num_bytes for part in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """One of a job's files: the parts of one command, and the versions that write them."""

    settings: Settings = field(compare=False)  # the ids of parts depend on them
    versions: Versions
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, settings: Settings, slices: Iterable[InputSlice]) -> JobFile:
        """Return the file of a command, with the installed versions."""
        return cls(
            settings=settings,
            versions=current_versions(settings["backend"]),
            parts=_parts_of(slices, settings),
        )

    @property
    def slices(self) -> tuple[InputSlice, ...]:
        return tuple(one for part in self.parts for one in part.slices)

    def encode(self) -> bytes:
        document = {
            "version": JOB_VERSION,
            "settings": self.settings,
            "versions": self.versions,
            "parts": [asdict(part) for part in self.parts],
        }
        return json.dumps(document, sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, uri: str) -> JobFile:
        """Return the job file of these bytes; refuse one of a newer version."""
        try:
            document = json.loads(data)
            if document["version"] != JOB_VERSION:
                raise ValueError(
                    f"version {document['version']!r}, but only {JOB_VERSION} is known"
                )
            parts = tuple(
                Part(id=part["id"], slices=tuple(InputSlice(**one) for one in part["slices"]))
                for part in document["parts"]
            )
            return cls(settings=document["settings"], versions=document["versions"], parts=parts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{uri}: is not a job's description ({type(error).__name__}: {error}); "
                "write the stream into another folder, or install the version that wrote this one"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's files in the order in which they were added."""

    files: tuple[JobFile, ...]

    @property
    def settings(self) -> Settings:
        return self.files[0].settings

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for file in self.files for part in file.parts)


def current_versions(backend: str) -> Versions:
    """Return the versions of streampack and of the libraries that bytes depend on."""
    libraries = LIBRARIES if backend != "gigatoken" else (*LIBRARIES, backend)
    return {"streampack": streampack.__version__} | {name: installed(name) for name in libraries}


def read_job(output: Output) -> Job | None:
    """Return the job of an output, or None."""
    files: list[JobFile] = []
    while (data := output.read(name := _file_name(len(files)))) is not None:
        files.append(JobFile.decode(data, f"{output.url}/{name}"))
    return Job(files=tuple(files)) if files else None


def start_job(output: Output, settings: Settings, slices: Sequence[InputSlice]) -> Job:
    """Write the description of a new job, or return the same one that is there already.

    A job of which no part is done is replaced. Until the stream is whole, files may change: their
    parts are rewritten, and others are kept. Another job, or anything else, is refused.
    """
    job = read_job(output)
    if job is None and not output.is_empty():
        raise ConfigError(
            f"out={output.url!r} exists already and is not empty, and has no {JOB_FILE} to "
            "resume; remove it, or name another"
        )
    file = JobFile.of(settings, slices)
    if job is None:
        output.put_new(JOB_FILE, file.encode())
    elif job.files != (file,):
        names, own = ({one.uri for one in each.slices} for each in (job.files[0], file))
        # A command that could not work was corrected, or a bad input, until the stream is whole.
        is_corrected = (
            compared(job.settings) == compared(settings)
            and (job.files[0].versions, names) == (file.versions, own)
            and len(job.files) == 1
            and output.read(INDEX_FILE) is None
        )
        if is_corrected or not is_begun(output):
            output.put(JOB_FILE, file.encode())
    job = read_job(output) or Job(files=(file,))  # another process may have been first
    _check_same(output, job, settings)
    theirs, ours = job.files[0].slices, tuple(slices)
    if theirs == ours:
        return job
    _check_unchanged(output, theirs, ours)
    differing = sorted({one.uri for one in set(theirs) ^ set(ours)}) or [ours[0].uri]
    raise ConfigError(
        f"out={output.url!r} has another job, of other inputs or in another order "
        f"({', '.join(differing[:3])}{', ...' if len(differing) > 3 else ''}); {ANOTHER}, or set "
        "append=True to add inputs that it does not have"
    )


def is_begun(output: Output) -> bool:
    """Return whether any part is done."""
    return bool(output.names(f"{PARTS}/", f"/{PART_FILE}"))


def append_to_job(output: Output, settings: Settings, slices: Sequence[InputSlice]) -> Job:
    """Add the slices that a job does not have yet, as one more job file."""
    while True:
        job = read_job(output)
        if job is None:
            raise ConfigError(
                f"out={output.url!r} has no {JOB_FILE}, so append=True has nothing to add to; "
                "omit it to write a new stream"
            )
        _check_same(output, job, settings)
        known = {one for file in job.files for one in file.slices}
        _check_unchanged(output, known, slices)
        names = {one.uri for one in known}  # a file is added as a whole, however it was split
        new = [one for one in slices if one.uri not in names]
        if not new:
            return job
        # If another process was first, its additions are compared with ours.
        output.put_new(_file_name(len(job.files)), JobFile.of(settings, new).encode())


def _check_same(output: Output, job: Job, settings: Settings) -> None:
    theirs, ours = compared(job.settings), compared(settings)
    for name in theirs | ours:
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"out={output.url!r} has another job, with {name}={theirs.get(name)!r}, but "
                f"this one has {name}={ours.get(name)!r}; {ANOTHER}"
            )


def check_versions(output: Output, theirs: Versions, backend: str) -> None:
    """Refuse to write parts with other versions than their job file states."""
    for name, ours in current_versions(backend).items():
        if theirs.get(name) != ours:
            raise ConfigError(
                f"out={output.url!r} was begun with {name} {theirs.get(name)}, but "
                f"{ours or 'none'} is installed, and may write other bytes; install "
                f"{name}=={theirs.get(name)}, or name another folder"
            )


def _parts_of(slices: Iterable[InputSlice], settings: Settings) -> tuple[Part, ...]:
    """Return parts of neighbouring slices, of up to `part_bytes` together, or of one slice."""
    groups: list[list[InputSlice]] = []
    room = 0
    for one in slices:
        if not groups or one.num_bytes > room:
            groups.append([])
            room = settings["part_bytes"]
        groups[-1].append(one)
        room -= one.num_bytes
    own = compared(settings)
    parts = []
    for group in groups:
        text = json.dumps([own, [asdict(one) for one in group]], sort_keys=True).encode()
        digest = hashlib.blake2b(text, digest_size=10).hexdigest()
        parts.append(Part(id=digest, slices=tuple(group)))
    return tuple(parts)


def _check_unchanged(
    output: Output, theirs: Iterable[InputSlice], ours: Iterable[InputSlice]
) -> None:
    versions = {one.uri: one.version for one in theirs}
    for one in ours:
        known = versions.get(one.uri, one.version)
        if known != one.version:
            raise ConfigError(
                f"{one.uri}: has changed ({known} is now {one.version}) since out={output.url!r} "
                "was begun; restore it, put new rows into new files, or name another folder"
            )


def _file_name(number: int) -> str:
    return f"job.{number:05}.json" if number else JOB_FILE
