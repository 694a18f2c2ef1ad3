"""Open token files of other programs: find them, read their tables, cut virtual shards."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from streampack._paths import folder_of, local_path, walk_linked
from streampack.errors import ConfigError, DataError
from streampack.flat.documents import open_documents
from streampack.flat.file_checks import check_trailing
from streampack.flat.files import (
    DATASET_DICT,
    DATASET_STATE,
    FORMATS,
    GLOB,
    choose,
    format_named,
    mask_of,
    matching,
    order_of_dataset,
    split_source,
)
from streampack.flat.mapped_tables import tables_mapped
from streampack.flat.token_file import FoundFile, Options, TokenFile, TokenFormat, VirtualShards
from streampack.mds.columns import token_names
from streampack.mds.index import INDEX_FILE, MdsIndex
from streampack.storage.cache import ShardCache
from streampack.storage.download import fetch
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.locks import FileLocks
from streampack.storage.materialize import lock_s
from streampack.storage.names import versioned_name
from streampack.storage.verify import as_data_error
from streampack.stores.objects import StoredObject
from streampack.stores.retries import list_objects
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.flat_parts import cached_shards, with_masks
from streampack.streams.flat_shards import FlatShards, version_of
from streampack.streams.label_columns import TARGET_COLUMNS
from streampack.streams.parts import Numbering, SamplePart, chosen_part, chosen_shards, digest_text
from streampack.streams.token_stream import TokenStream

logger = logging.getLogger(__name__)

SHARD_FORMATS = ("mds", "litdata")
OPENING_THREADS = 16  # tables of a store wait for it


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
    if not os.path.isdir(source) and (
        source.endswith(endings) or GLOB & set(os.path.basename(source))
    ):
        return True
    if remote is not None or os.path.exists(os.path.join(source, INDEX_FILE)):
        return False
    if os.path.isdir(source):
        # A folder with an index.json has shards, whatever their names.
        return any(
            INDEX_FILE not in names and any(name.endswith(endings) for name in names)
            for _, _, names in walk_linked(source)
        )
    return any(os.path.exists(f"{source}{ending}") for ending in endings)


def open_flat(stream: Any, number: int, disk: LocalFilesystem | None = None) -> TokenStream:
    """Open a `Stream` of token files.

    Raises:
        ConfigError: If no format, or several, fit the files.
        DataError: If a table is missing, or does not fit its tokens.
    """
    _check_options(stream)
    form = None if stream.format is None else format_named(stream.format)
    found = find_files(stream, form, disk)
    location, folder = found.location, found.folder
    name = stream.name or found.default_name
    opened = open_files(stream, found)
    if found.form.name != "arrow" and stream.trailing is None:  # other bytes are in Arrow's files
        check_trailing(name, opened, folder)
    files = with_masks([file for file, _ in opened], found.stored)
    virtual, part = _cut(opened, stream, name)
    for column in TARGET_COLUMNS:
        if column in files[0].columns:
            logger.warning(
                "stream %r: its column %r is not read, so every token is a target; write a stream "
                "that has it (streampack write), or save the dataset without it",
                name,
                column,
            )
    cache = ShardCache(location, disk)
    index = MdsIndex(uri=str(stream.remote), shards=())
    if folder is None:
        index, parts = cached_shards(files, virtual, str(stream.remote))
        cache = ShardCache(replace(location, parts=parts), disk)
        cache.check(index)
        cache.metadata.fetched += found.fetched
    shards = FlatShards(
        cache=cache,
        index=index,
        root=folder or location.folder,
        files=files,
        virtual=virtual,
        begins_with_bos=stream.begins_with_bos,
        ends_with_eos=stream.ends_with_eos,
    )
    digest = _digest(found.form.name, _unit(stream), files, virtual, part)
    columns = ColumnSelection.of(stream)
    if (mask := files[0].mask) is not None:
        columns = replace(columns, loss_mask=mask.name)
    own = {"digest": digest, "entries_digest": digest, "columns": columns}
    return TokenStream.of(stream, number, name, shards, part, **own)


def _check_options(stream: Any) -> None:
    for option in ("labels", "loss_mask"):
        if (column := getattr(stream, option)) is not None:
            raise ConfigError(
                f"{option}={column!r}: token files have no such columns, and a loss mask beside "
                "them is found by its name; omit it, or write a stream that has it: streampack "
                "write"
            )
    if stream.split:
        raise ConfigError(
            f"split={stream.split!r}: token files have no splits; name the subfolder in local= or "
            "remote=, or hold out samples with part="
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files of a stream; those that describe tokens are fetched from a store once a node."""

    form: TokenFormat
    names: Sequence[str]
    """The token files, in order, below the root."""
    of_name: Mapping[str, StoredObject]
    """These, and all files that may describe them."""
    location: StreamLocation
    folder: Path | None
    """The root on this machine; None if it is in a store."""
    default_name: str
    disk: LocalFilesystem
    fetched: list[int] = field(default_factory=list)
    """Bytes of each table that this process fetched."""

    def file(self, name: str) -> FoundFile:
        """Return a token file, by its name below the root."""
        found = self.of_name.get(name)
        if found is None:
            raise DataError(f"{self.location.uri(name)}: does not exist; correct its name")
        if not found.num_bytes:
            raise DataError(f"{self.location.uri(name)}: is empty; omit it, or make a new copy")
        return FoundFile(
            name=name, num_bytes=found.num_bytes, version=found.version, path_of=self.path_of
        )

    def stored(self, name: str) -> StoredObject | None:
        """Return the entry of a file by its name below the root; None if there is none."""
        is_here = self.folder is not None and os.path.isfile(os.path.join(self.folder, name))
        if name in self.of_name or self.folder is None or not is_here:
            return self.of_name.get(name)
        return _found_in_folder(self.folder, [name], LocalFilesystem())[name]

    def path_of(self, name: str) -> Path | None:
        """Return the path of a file by its name below the root; None if there is none."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        found = self.of_name.get(name)
        if found is None:
            return None
        path = self.location.folder / versioned_name(name, found.version)
        if self.disk.state(path) is None:  # a whole cache may be on a disk that is read-only
            with as_data_error(path, found.num_bytes):
                self._fetch(name, path, found.num_bytes)
        return path

    def _fetch(self, name: str, path: Path, num_bytes: int) -> None:
        locks = FileLocks(self.location.folder, self.disk)
        with locks.hold(path.name, lock_s(self.location, num_bytes)):
            if self.disk.state(path) is None:
                with locks.temporary(path.name) as temporary:
                    fetch(self.location, name, temporary, num_bytes=num_bytes)
                    self.fetched.append(num_bytes)
                    self.disk.rename(temporary, path)


def find_files(
    stream: Any, form: TokenFormat | None, disk: LocalFilesystem | None = None
) -> FoundFiles:
    """Return the token files of a stream, of one format; errors as of `open_flat`."""
    source = stream.local if stream.remote is None else stream.remote
    root, listed, pattern = split_source(source)
    copied = copy.copy(stream)
    here = root if stream.remote is None else folder_of(root)
    copied.remote, copied.local = (root, stream.local) if here is None else (None, here)
    location = StreamLocation.of(copied)
    disk = disk or LocalFilesystem()
    ShardCache(location, disk).metadata.make_root_private()
    folder = location.folder if location.remote is None else None
    of_name = (
        _found_in_store(location, listed, pattern)
        if folder is None
        else _found_in_folder(folder, listed, disk)
    )
    names = matching(of_name, pattern) if listed is None else listed
    form, chosen = choose(names, str(source), form)
    if listed is not None and len(chosen) < len(listed):
        other = next(name for name in listed if name not in set(chosen))
        raise ConfigError(
            f"{location.uri(other)}: is not a {form.suffix} file of {form.name}; list only the "
            "files with tokens"
        )
    found = FoundFiles(
        form=form,
        names=chosen,
        of_name=of_name,
        location=location,
        folder=folder,
        default_name=Path(pattern or root).name or root,
        disk=disk,
    )
    if form.name == "arrow" and listed is None and not pattern:
        if found.path_of(DATASET_DICT) is not None:
            split = location.uri(os.path.dirname(chosen[0]))
            raise ConfigError(
                f"{source}: has the splits of a DatasetDict; name the folder of one, such as "
                f"{split}"
            )
        state = found.path_of(DATASET_STATE)
        if state is not None:
            found = replace(found, names=order_of_dataset(chosen, state.read_bytes()))
    return found


def _found_in_folder(
    folder: Path, listed: Sequence[str] | None, disk: LocalFilesystem
) -> dict[str, StoredObject]:
    if listed is None:
        listed = []
        for where, _, names in walk_linked(folder) if folder.is_dir() else ():
            inside = os.path.relpath(where, folder)
            below = "" if inside == "." else f"{inside}/"
            listed += [f"{below}{name}" for name in names if not f"{below}{name}".startswith(".")]
    found = {}
    for name in listed:
        path = folder / name
        with as_data_error(path, is_retried=False):
            state = disk.state(path)
        if state is None or not path.is_file():
            raise DataError(f"{path}: does not exist, or is not a file; correct its name")
        found[name] = StoredObject(str(path), version_of(state), state.num_bytes)
    return found


def _found_in_store(
    location: StreamLocation, listed: Sequence[str] | None, pattern: str
) -> dict[str, StoredObject]:
    start = len(f"{location.remote}/")
    if listed is None:
        # Without the ending, a file's table is listed, too; a loss mask has another name.
        stem, mask = os.path.splitext(pattern)[0], mask_of(pattern) or ""
        literal = os.path.dirname(pattern) if mask and not mask.startswith(stem) else stem
        literal = re.split(r"[*?[]", literal)[0]
        prefixes = [location.uri(literal)]
    else:
        prefixes = sorted({f"{os.path.dirname(location.uri(name))}/" for name in listed})
    return {
        each.url[start:]: each
        for prefix in prefixes
        for each in list_objects(prefix, way_out="check the path and the access to it")
    }


def _unit(stream: Any) -> str:
    """Return what a sample of Megatron's files is; a `Stream` also says by `unit` how to split."""
    return "sequence" if stream.unit == "sequence" else "document"


def open_files(stream: Any, found: FoundFiles) -> list[tuple[TokenFile, VirtualShards]]:
    """Open the token files of a stream, and cut them; errors as of `open_flat`."""
    if stream.unit == "sequence" and found.form.name in ("olmo", "datatrove", "arrow"):
        raise ConfigError(
            f"unit='sequence': {found.form.name} has documents alone; omit it, as it is for "
            "Megatron's files"
        )
    open_one = partial(open_found, stream, found)
    if found.folder is not None:
        return list(map(open_one, found.names))
    if stream.index is None and found.form.name == "arrow":
        sources = stream.remote if isinstance(stream.remote, str) else " ".join(stream.remote)
        raise ConfigError(
            f"remote={stream.remote!r}: the boundaries of Arrow files are between their tokens, so "
            "they would be fetched whole to be planned; run `streampack index "
            f"{sources} --format arrow --out FOLDER` once, and set Stream(index=FOLDER)"
        )
    with ThreadPoolExecutor(OPENING_THREADS) as threads:
        return list(threads.map(open_one, found.names))


def open_found(stream: Any, found: FoundFiles, name: str) -> tuple[TokenFile, VirtualShards]:
    """Return one token file of a stream with its virtual shards; errors as of `open_flat`."""
    file = found.file(name)
    with as_data_error(Path(found.location.uri(name)), is_retried=False), tables_mapped():
        if stream.index is None:
            options = Options(
                tokens=token_names(ColumnSelection.of(stream).tokens),
                dtype=stream.tokens_dtype,
                unit=_unit(stream),
                ignores_trailing=stream.trailing == "ignore",
            )
            opened = found.form.open(file, options)
        else:
            index = local_path(stream.index, "index")
            opened = open_documents(name, file.num_bytes, index, split_at=stream.split_at)
        shards = opened.cut(0, opened.boundaries.num_samples)
    if stream.tokens_dtype not in (None, opened.dtype):
        raise ConfigError(
            f"tokens_dtype={stream.tokens_dtype!r}: {found.location.uri(name)} has tokens of "
            f"{opened.dtype}; omit tokens_dtype, or correct it"
        )
    return opened if file.version is None else replace(opened, version=file.version), shards


def _cut(
    opened: Sequence[tuple[TokenFile, VirtualShards]], stream: Any, name: str
) -> tuple[VirtualShards, SamplePart | None]:
    """Return the virtual shards of files, of the samples or shards that a `Stream` chooses."""
    counts = [file.boundaries.num_samples for file, _ in opened]
    first, stop = 0, sum(counts)
    if not stop:
        raise DataError(f"stream {name!r}: its token files have no documents; copy them again")
    if stream.samples is not None:
        first, stop = chosen_part(stream.samples, stop, "samples", name)
    before = np.cumsum([0, *counts])
    chosen = [n for n in range(len(opened)) if before[n] < stop and first < before[n + 1]]
    parts = [
        whole
        if first <= before[n] and before[n + 1] <= stop
        else file.cut(max(first - before[n], 0), min(stop - before[n], counts[n]))
        for n, (file, whole) in ((n, opened[n]) for n in chosen)
    ]
    shards = VirtualShards.of(chosen, parts)
    names = np.array([os.path.basename(file.name) for file, _ in opened], np.object_)
    counts_of = np.diff(shards.first_sample)
    numbering = Numbering(names[shards.file], shards.cells, shards.first_document, counts_of)
    numbers, part = chosen_shards(stream, numbering, name)
    return shards if numbers is None else shards.take(numbers), part


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
    masks = [() if file.mask is None else (file.mask.name,) for file in files]
    names = [(file.name, file.dtype, *mask) for file, mask in zip(files, masks, strict=True)]
    text = repr((form, unit, [names[n] for n in dict.fromkeys(shards.file.tolist())]))
    content = hashlib.blake2b(text.encode() + digest_text(part), digest_size=16)
    for array in (shards.file, shards.extents, np.diff(shards.first_sample)):
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()
