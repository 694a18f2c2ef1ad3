"""The description of a job: what its parts are, and everything that their bytes depend on.

::

    job.json         settings, versions, parts 0 1 2     written first, never changed
    job.00001.json   the same settings, parts 3 4        one more for each --append
    parts/<id>/      of each part: shards, samples.bin, and last part.json

A part is a unit of the input (texts/units.py): a range of a file, or several small files. Its id is
a hash of the unit and of the settings. So every process that writes a part writes the same bytes to
the same names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias, TypeVar, cast

from streampack._extras import installed
from streampack.errors import ConfigError, DataError
from streampack.mds.index import INDEX_FILE
from streampack.texts.inputs.slices import InputSlice
from streampack.texts.token_shard import library_versions
from streampack.write.job_output import Output

JOB_FILE = "job.json"
PARTS = "parts"
PART_FILE = "part.json"
SAMPLES_FILE = "samples.bin"
JOB_VERSION = 6
Versions: TypeAlias = dict[str, str | None]
ANOTHER = "repeat the command that began it, or name another folder"
Units: TypeAlias = tuple[InputSlice, ...]
Settings: TypeAlias = dict[str, Any]
"""Everything but the input that the bytes of parts depend on, as JSON has it: the fields of
`SampleSchema`, `ShardLayout` and `RowFormat`, of which it has `keep` for its columns, `part_bytes`,
and the `tokenizer` as a digest and as `tokenizer_facts`, which are those of `Written.tokenizer`."""

T = TypeVar("T")


def setting(kind: type[T], settings: Settings) -> T:
    """Return the `SampleSchema` or `ShardLayout` of settings."""
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
    def of(cls, settings: Settings, parts: Iterable[Units]) -> JobFile:
        """Return the file of a command, with the installed versions."""
        own = compared(settings)
        return cls(
            settings=settings,
            versions=current_versions(settings),
            parts=tuple(_part_of(units, own) for units in parts),
        )

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


def current_versions(settings: Settings) -> Versions:
    """Return the versions of streampack and of the libraries that bytes depend on."""
    of_ids = library_versions(settings["backend"], is_chat=settings["chat"] is not None)
    return {**of_ids, "zstandard": installed("zstandard")}


def read_job(output: Output) -> Job | None:
    """Return the job of an output, or None."""
    files: list[JobFile] = []
    while (data := output.read(name := _file_name(len(files)))) is not None:
        files.append(JobFile.decode(data, f"{output.url}/{name}"))
    return Job(files=tuple(files)) if files else None


def begin_job(
    output: Output,
    settings: Settings,
    files: Sequence[InputSlice],
    cut: Callable[[Sequence[InputSlice]], Sequence[Units]],
    *,
    append: bool = False,
) -> Job:
    """Return the job of an output, which is written first; with `append`, extended by new files.

    `cut` returns the units of files, of which each is a part.

    A job of which no part is done is replaced. Until the stream is whole, files may change: their
    parts are rewritten, and others are kept. Another job, or anything else, is refused.
    """
    job, ours = read_job(output), {file.uri: file.version for file in files}
    if job is None and append:
        raise ConfigError(
            f"out={output.url!r} has no {JOB_FILE}, so append=True has nothing to add to; omit it "
            "to write a new stream"
        )
    if job is None and not output.is_empty():
        raise ConfigError(
            f"out={output.url!r} exists already and is not empty, and has no {JOB_FILE} to "
            "resume; remove it, or name another"
        )
    if job is None:
        output.put_new(JOB_FILE, JobFile.of(settings, cut(files)).encode())
    elif not append and _is_replaced(output, job, settings, ours):
        output.put(JOB_FILE, JobFile.of(settings, cut(files)).encode())
    while True:  # another process may have been first
        job = read_job(output)
        if job is None:
            raise DataError(
                f"{output.url}/{JOB_FILE}: was removed while the job began; run the same command "
                "again, and remove nothing meanwhile"
            )
        _check_same(output, job, settings)
        theirs = _versions_of(job.parts)
        _check_unchanged(output, theirs, ours)
        new = [file for file in files if file.uri not in theirs]
        if not append or not new:
            break
        added = JobFile.of(settings, cut(new))
        output.put_new(_file_name(len(job.files)), added.encode())
    first = _versions_of(job.files[0].parts)
    if not append and list(first) != list(ours):
        differing = sorted(first.keys() ^ ours.keys()) or list(ours)
        raise ConfigError(
            f"out={output.url!r} has another job, of other inputs or in another order "
            f"({', '.join(differing[:3])}{', ...' if len(differing) > 3 else ''}); {ANOTHER}, or "
            "set append=True to add inputs that it does not have"
        )
    return job


def is_begun(output: Output) -> bool:
    """Return whether any part is done."""
    return bool(output.names(f"{PARTS}/", f"/{PART_FILE}"))


def _is_replaced(output: Output, job: Job, settings: Settings, ours: dict[str, str]) -> bool:
    """Return whether a command replaces a job, because it, or one of its inputs, was corrected."""
    first, theirs = job.files[0], _versions_of(job.files[0].parts)
    is_like = (
        compared(job.settings) == compared(settings)
        and first.versions == current_versions(settings)
        and len(job.files) == 1
    )
    if is_like and list(theirs.items()) == list(ours.items()):
        return False
    is_corrected = is_like and theirs.keys() == ours.keys() and output.read(INDEX_FILE) is None
    return is_corrected or not is_begun(output)


def _versions_of(parts: Iterable[Part]) -> dict[str, str]:
    """Return the versions of files, in order."""
    return {one.uri: one.version for part in parts for one in part.slices}


def _check_same(output: Output, job: Job, settings: Settings) -> None:
    theirs, ours = compared(job.settings), compared(settings)
    for name in theirs | ours:
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"out={output.url!r} has another job, with {name}={theirs.get(name)!r}, but "
                f"this one has {name}={ours.get(name)!r}; {ANOTHER}"
            )


def check_versions(output: Output, theirs: Versions, settings: Settings) -> None:
    """Refuse to write parts with other versions than their job file states."""
    for name, ours in current_versions(settings).items():
        if theirs.get(name) != ours:
            raise ConfigError(
                f"out={output.url!r} was begun with {name} {theirs.get(name)}, but "
                f"{ours or 'none'} is installed, and may write other bytes; install "
                f"{name}=={theirs.get(name)}, or name another folder"
            )


def _part_of(units: Units, own: Settings) -> Part:
    text = json.dumps([own, [asdict(one) for one in units]], sort_keys=True).encode()
    return Part(id=hashlib.blake2b(text, digest_size=10).hexdigest(), slices=units)


def _check_unchanged(output: Output, theirs: dict[str, str], ours: dict[str, str]) -> None:
    for uri, version in ours.items():
        if (known := theirs.get(uri, version)) != version:
            raise ConfigError(
                f"{uri}: has changed ({known} is now {version}) since out={output.url!r} "
                "was begun; restore it, put new rows into new files, or name another folder"
            )


def _file_name(number: int) -> str:
    return f"job.{number:05}.json" if number else JOB_FILE
