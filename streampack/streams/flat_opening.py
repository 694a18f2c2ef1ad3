"""Open token files of other programs: find them, read their tables, cut virtual shards."""

from __future__ import annotations

import copy
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streampack._paths import local_path
from streampack.errors import ConfigError, DataError
from streampack.flat.documents import DOCUMENTS, HASH, open_documents
from streampack.flat.files import (
    DATASET_STATE,
    FORMATS,
    GLOB,
    FoundFile,
    Options,
    TokenFormat,
    choose,
    format_named,
    matches,
    order_of_dataset,
    split_source,
)
from streampack.flat.token_file import TokenFile, VirtualShards, tables_mapped
from streampack.mds.index import INDEX_FILE, Layout, MdsIndex, Shard, ShardFile
from streampack.storage.cache import ShardCache
from streampack.storage.download import Part, fetch, fetch_part
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import FileLocks
from streampack.storage.materialize import Downloader, lock_s
from streampack.storage.names import versioned_name
from streampack.stores.objects import Found
from streampack.stores.retries import list_objects
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.ends import StreamEnds
from streampack.streams.flat_stream import FlatStream
from streampack.streams.parts import SamplePart, chosen_part, chosen_shards, digest_text

SHARD_FORMATS = ("mds", "litdata")
"""Formats of shards with an index.json."""
OPENING_THREADS = 16  # tables of a store wait for it
NO_LAYOUT = Layout(names=(), encodings=(), sizes=())


def is_flat(stream: Any) -> bool:
    """Return whether a `Stream` is token files rather than shards with an index.json."""
    form = getattr(stream, "format", None)
    if form is not None:
        return form not in SHARD_FORMATS
    remote, local = stream.remote, stream.local
    source = local if remote is None else remote
    if source is None or getattr(stream, "split", None):
        return False
    if not isinstance(source, str):
        return not hasattr(source, "__fspath__")
    endings = tuple(each.suffix for each in FORMATS)
    if source.endswith(endings) or GLOB & set(os.path.basename(source)):
        return not os.path.isdir(source)
    if remote is not None or os.path.exists(os.path.join(source, INDEX_FILE)):
        return False
    if os.path.isdir(source):
        # A folder with an index.json has shards, whatever their names.
        return any(
            INDEX_FILE not in names and any(name.endswith(endings) for name in names)
            for _, _, names in os.walk(source)
        )
    return any(os.path.exists(f"{source}{ending}") for ending in endings)


def open_flat(stream: Any, number: int, disk: LocalFilesystem | None = None) -> FlatStream:
    """Open a `Stream` of token files.

    Raises:
        ConfigError: If no format, or several, fit the files.
        DataError: If a table is missing, or does not fit its tokens.
    """
    form = None if stream.format is None else format_named(stream.format)
    found = find_files(stream, form)
    location, folder = found.location, found.folder
    name = stream.name or found.default_name
    files = open_files(stream, found)
    shards, part = _cut(files, stream, name)
    cache = ShardCache(location, disk)
    entries: tuple[Shard, ...] = ()
    if folder is None:
        entries, parts = _entries(files, shards)
        cache = ShardCache(location, disk, Downloader(fetch=partial(fetch_part, parts)))
        cache.check(MdsIndex(uri=str(stream.remote), shards=entries))
    opened = FlatStream(
        name=name,
        number=number,
        proportion=stream.proportion,
        repeat=stream.repeat,
        choose=stream.choose,
        max_seq_len=stream.max_seq_len,
        max_passes=stream.max_passes,
        on_exhausted=stream.on_exhausted,
        begins_with_bos=stream.begins_with_bos,
        ends_with_eos=stream.ends_with_eos,
        ends=StreamEnds.of(stream),
        columns=ColumnSelection.of(stream),
        cache=cache,
        root=folder or location.folder,
        files=files,
        entries=entries,
        shards=shards,
        digest=_digest(found.form.name, _unit(stream), files, shards, part),
        part=part,
    )
    return opened if part is None else replace(opened, part=part.with_tokens(opened.stored_lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files of a stream."""

    form: TokenFormat
    names: Sequence[str]
    """The token files, in order, below the root."""
    of_name: Mapping[str, Found]
    """These, and all files that may describe them."""
    location: StreamLocation
    folder: Path | None
    """The root on this machine; None if it is in a store."""
    default_name: str


def find_files(stream: Any, form: TokenFormat | None) -> FoundFiles:
    """Return the token files of a stream, of one format; errors as of `open_flat`."""
    source = stream.local if stream.remote is None else stream.remote
    root, listed, pattern = split_source(source)
    copied = copy.copy(stream)
    copied.remote, copied.local = (None, root) if stream.remote is None else (root, stream.local)
    location = StreamLocation.of(copied)
    folder = location.plain_folder if location.remote is None else location.remote_folder
    of_name = (
        _found_in_store(location, listed, pattern)
        if folder is None
        else _found_in_folder(folder, listed)
    )
    names = sorted(name for name in of_name if matches(name, pattern)) if listed is None else listed
    form, chosen = choose(names, str(source), form)
    if form.name == "arrow":
        if folder is None:
            raise ConfigError(
                f"remote={source!r}: Arrow files are mapped, so they must be on a disk; copy them, "
                "or write them as a stream once: streampack write --tokens"
            )
        if listed is None and not pattern:
            chosen = order_of_dataset(chosen, LocalFilesystem().read(folder / DATASET_STATE))
    return FoundFiles(
        form=form,
        names=chosen,
        of_name=of_name,
        location=location,
        folder=folder,
        default_name=Path(pattern or root).name,
    )


def _found_in_folder(folder: Path, listed: Sequence[str] | None) -> dict[str, Found]:
    """Return the files below a folder by name; of a list, those."""
    if listed is None:
        listed = []
        for path, _, names in os.walk(folder):
            inside = os.path.relpath(path, folder)
            below = "" if inside == "." else f"{inside}/"
            listed += [f"{below}{name}" for name in names if not f"{below}{name}".startswith(".")]
    found = {}
    for name in listed:
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
        except OSError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: does not exist, or is not a file; correct its name")
        found[name] = Found(path, "", status.st_size)
    return found


def _found_in_store(
    location: StreamLocation, listed: Sequence[str] | None, pattern: str
) -> dict[str, Found]:
    """Return the objects below a remote by name: those of a list's folders, or of a pattern."""
    start = len(f"{location.remote}/")
    if listed is None:
        # Without the ending, a file's table is listed, too.
        literal = os.path.dirname(pattern) if GLOB & set(pattern) else os.path.splitext(pattern)[0]
        prefixes = [location.uri(literal)]
    else:
        prefixes = sorted({f"{os.path.dirname(location.uri(name))}/" for name in listed})
    return {
        each.url[start:]: each
        for prefix in prefixes
        for each in list_objects(prefix, way_out="check the path and the access to it")
    }


class _Tables:
    """The files that describe tokens, on this disk; those of a store are fetched once a node."""

    def __init__(
        self, location: StreamLocation, folder: Path | None, found: Mapping[str, Found]
    ) -> None:
        self._location, self._folder, self._found = location, folder, found

    def file(self, name: str) -> FoundFile:
        """Return a token file, by its name below the root."""
        found = self._found.get(name)
        if found is None:
            raise DataError(f"{self._location.uri(name)}: does not exist; correct its name")
        return FoundFile(
            name=name, num_bytes=found.num_bytes, version=found.version, path_of=self.path_of
        )

    def path_of(self, name: str) -> Path | None:
        """Return the path of a file by its name below the root; None if there is none."""
        if self._folder is not None:
            path = self._folder / name
            return path if path.is_file() else None
        found = self._found.get(name)
        if found is None:
            return None
        path = self._location.folder / versioned_name(name, found.version)
        locks = FileLocks(self._location.folder, LocalFilesystem())
        with locks.hold(path.name, lock_s(self._location, found.num_bytes)):
            if not path.exists():
                with locks.temporary(path.name) as temporary:
                    fetch(self._location, name, temporary, num_bytes=found.num_bytes)
                    LocalFilesystem().rename(temporary, path)
        return path


def _unit(stream: Any) -> str:
    """Return what a sample of Megatron's files is; a `Stream` also says by `unit` how to split."""
    return "sequence" if stream.unit == "sequence" else "document"


def open_files(stream: Any, found: FoundFiles) -> tuple[TokenFile, ...]:
    """Open the token files of a stream; errors as of `open_flat`."""
    options = Options(
        tokens=("tokens", "input_ids") if stream.tokens == "tokens" else (stream.tokens,),
        dtype=stream.tokens_dtype,
        unit=_unit(stream),
    )
    tables = _Tables(found.location, found.folder, found.of_name)
    index = None if stream.index is None else local_path(stream.index, "index")

    def open_one(name: str) -> TokenFile:
        file = tables.file(name)
        if not file.num_bytes:
            raise DataError(f"{name}: is empty; omit it, or make a new copy")
        with tables_mapped():
            if index is None:
                opened = found.form.open(file, options)
            else:
                opened = open_documents(name, file.num_bytes, index, split_at=stream.split_at)
        return replace(opened, version=file.version)

    if found.folder is not None:
        return tuple(map(open_one, found.names))
    with ThreadPoolExecutor(OPENING_THREADS) as threads:
        return tuple(threads.map(open_one, found.names))


def _cut(
    files: Sequence[TokenFile], stream: Any, name: str
) -> tuple[VirtualShards, SamplePart | None]:
    """Return the virtual shards of files, of the samples or shards that a `Stream` chooses."""
    counts = [file.boundaries.num_samples for file in files]
    first, stop = 0, sum(counts)
    if not stop:
        raise DataError(f"stream {name!r}: its token files have no documents; copy them again")
    if stream.samples is not None:
        first, stop = chosen_part(stream.samples, stop, "samples", name)
    before = np.cumsum([0, *counts])
    chosen = [n for n in range(len(files)) if before[n] < stop and first < before[n + 1]]
    parts = [
        files[n].cut(max(first - before[n], 0), min(stop - before[n], counts[n])) for n in chosen
    ]
    shards = VirtualShards.of(chosen, parts)
    numbers, part = chosen_shards(stream, shards.first_sample, name)
    return shards if numbers is None else shards.take(numbers), part


def _entries(
    files: Sequence[TokenFile], shards: VirtualShards
) -> tuple[tuple[Shard, ...], dict[str, Part]]:
    """Return the virtual shards of remote files as shards of a cache, and what to fetch of each."""
    entries, parts = [], {}
    for number, (start, stop), count in zip(
        shards.file.tolist(), shards.extents.tolist(), np.diff(shards.first_sample), strict=True
    ):
        file = files[number]
        part = Part(name=file.name, start=start, stop=stop, version=file.version)
        basename = f"{versioned_name(file.name, file.version or '')}.{start}-{stop}"
        parts[basename] = part
        digest = file.hashes.get((start, stop))
        hashes = {} if digest is None else {HASH: digest}
        raw = ShardFile(
            basename=basename, num_bytes=stop - start, hashes=hashes, hashes_from=DOCUMENTS
        )
        entries.append(
            Shard(num_samples=int(count), raw=raw, packed=None, compression=None, layout=NO_LAYOUT)
        )
    return tuple(entries), parts


def _digest(
    form: str,
    unit: str,
    files: Sequence[TokenFile],
    shards: VirtualShards,
    part: SamplePart | None,
) -> str:
    """Return a digest of the shards: their files' names, their bytes and their numbers of samples.

    After files were appended to a stream, the former shards have the former digest.
    """
    names = [(file.name, file.dtype) for file in files]
    text = repr((form, unit, [names[n] for n in dict.fromkeys(shards.file.tolist())]))
    content = hashlib.blake2b(text.encode() + digest_text(part), digest_size=16)
    for array in (shards.file, shards.extents, np.diff(shards.first_sample)):
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()
