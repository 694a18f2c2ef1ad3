"""Open token files of other programs: find them, read their tables, cut virtual shards."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from streampack._paths import folder_of, local_path, walk_linked
from streampack.config.download import Download
from streampack.config.held_out import HeldOut
from streampack.errors import ConfigError, DataError
from streampack.flat.documents import open_documents
from streampack.flat.file_checks import START_BYTES, check_start, check_trailing
from streampack.flat.files import (
    DATASET_DICT,
    DATASET_STATE,
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
from streampack.mds.index import INDEX_FILE, Shard
from streampack.mds.regular_files import open_file
from streampack.storage.cache import ShardCache
from streampack.storage.download import fetch
from streampack.storage.filesystem import LocalFilesystem
from streampack.storage.location import StreamLocation
from streampack.storage.names import versioned_name
from streampack.storage.verify import as_data_error
from streampack.stores.objects import StoredObject
from streampack.stores.retries import list_objects, request
from streampack.streams.column_selection import ColumnSelection
from streampack.streams.flat_parts import cached_shards, with_masks
from streampack.streams.flat_shards import FlatShards, version_of
from streampack.streams.label_columns import TARGET_COLUMNS
from streampack.streams.parts import Numbering, SamplePart, chosen_part, chosen_shards, digest_text
from streampack.streams.token_stream import Opening, TokenStream
from streampack.texts.inputs.listing import with_rows
from streampack.texts.inputs.sources import Listing

logger = logging.getLogger(__name__)

OPENING_THREADS = 16  # tables of a store wait for it


def open_flat(source: Any, opening: Opening) -> TokenStream:
    """Open the token files of a `TokenFiles`.

    Raises:
        ConfigError: If no format, or several, fit the files.
        DataError: If a table is missing, or does not fit its tokens.
    """
    found = find_files(source, opening.disk)
    name = opening.stream.name or found.default_name
    opened = open_files(source, found)
    if found.form.name != "arrow" and source.trailing is None:  # other bytes are in Arrow's files
        check_trailing(name, opened)
    files = with_masks([file for file, _ in opened], found.of_name)
    virtual, part = _cut(opened, source, opening.stream.held_out, name)
    for column in TARGET_COLUMNS:
        if column in files[0].columns:
            logger.warning(
                "stream %r: its column %r is not read, so every token is a target; write a stream "
                "that has it (streampack write), or save the dataset without it",
                name,
                column,
            )
    cache, entries = found.cache, tuple[Shard, ...]()
    if cache.is_remote:
        entries, parts = cached_shards(files, virtual)
        cache = ShardCache(replace(cache.location, parts=parts), opening.disk)
        cache.check(entries)
        cache.metadata.fetched += found.cache.metadata.fetched
    shards = FlatShards(
        cache=cache,
        entries=entries,
        files=files,
        virtual=virtual,
        has=source.has,
    )
    digest = _digest(found.form.name, source.unit, files, virtual, part)
    columns = ColumnSelection.of(source)
    if (mask := files[0].mask) is not None:
        columns = replace(columns, loss_mask=mask.name)
    return TokenStream.of(
        opening,
        name,
        shards,
        part,
        columns=columns,
        split_at=source.split_at,
        digest=digest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files of a stream; those that describe tokens are fetched from a store once a node."""

    form: TokenFormat
    names: Sequence[str]
    """The token files, in order, below the root."""
    of_name: Mapping[str, StoredObject]
    """These, and all files that may describe them."""
    default_name: str
    cache: ShardCache
    """Has the root, and keeps files of a store that describe tokens."""

    def file(self, name: str) -> FoundFile:
        """Return a token file, by its name below the root."""
        found, uri = self.of_name.get(name), self.cache.location.uri(name)
        if found is None:
            raise DataError(f"{uri}: does not exist; correct its name")
        if not found.num_bytes:
            raise DataError(f"{uri}: is empty; omit it, or make a new copy")
        return FoundFile(
            name=name, num_bytes=found.num_bytes, version=found.version, path_of=self.path_of
        )

    def start_of(self, name: str) -> bytes:
        """Return the first `START_BYTES` of a token file."""
        if not self.cache.is_remote:
            with open_file(self.cache.folder / name) as tokens:
                return tokens.read(START_BYTES)
        url, version, _ = self.of_name[name]
        return request(url, "read", lambda store: store.read(url, 0, START_BYTES, version=version))

    def path_of(self, name: str) -> Path | None:
        """Return the path of a file by its name below the root; None if there is none."""
        if not self.cache.is_remote:
            path = self.cache.folder / name
            return path if path.is_file() else None
        found = self.of_name.get(name)
        if found is None:
            return None
        path = self.cache.folder / versioned_name(name, found.version)
        if self.cache.file_state(path) is None:  # a whole cache may be on a disk that is read-only
            call = partial(fetch, self.cache.location, name, num_bytes=found.num_bytes)
            with as_data_error(path, found.num_bytes):
                self.cache.metadata.fetch_once(path, call, found.num_bytes)
        return path


def find_files(source: Any, disk: LocalFilesystem | None = None) -> FoundFiles:
    """Return the token files of a `TokenFiles`, of one format; errors as of `open_flat`."""
    form = None if source.format is None else format_named(source.format)
    root, listed, pattern = split_source(source.files)
    here = folder_of(root)
    location = StreamLocation.of(
        remote=root if here is None else None,
        local=source.local if here is None else here,
        download=source.download or Download(),
    )
    cache = ShardCache(location, disk)
    cache.metadata.make_root_private()
    find = _found_in_store if cache.is_remote else _found_in_folder
    of_name = find(cache, listed, pattern)
    names = matching(of_name, pattern, form) if listed is None else listed
    if form is None and listed is None and INDEX_FILE in names:
        word = "remote" if cache.is_remote else "local"
        raise ConfigError(
            f"{location.uri('')}: has an index.json: its files are shards, which "
            f"are another source; write Stream(Shards({word}={str(source.files)!r}))"
        )
    form, chosen = choose(names, str(source.files), form)
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
        default_name=Path(pattern or root).name or root,
        cache=cache,
    )
    if form.name == "arrow" and listed is None and not pattern:
        if found.path_of(DATASET_DICT) is not None:
            split = location.uri(os.path.dirname(chosen[0]))
            raise ConfigError(
                f"{source.files}: has the splits of a DatasetDict; name the folder of one, such as "
                f"{split}"
            )
        state = found.path_of(DATASET_STATE)
        if state is not None:
            found = replace(found, names=order_of_dataset(chosen, state.read_bytes()))
        else:  # may be the cache of `datasets`, which has more than the rows of one split
            folder = location.uri("").rstrip("/")
            files = [each._replace(url=f"{folder}/{name}") for name, each in of_name.items()]
            rows = {each.url for each in with_rows(Listing(folder, files))}
            names = [name for name in chosen if f"{folder}/{name}" in rows]
            if not names:
                raise ConfigError(
                    f"{source.files}: has only files that map and filter of datasets left, such as "
                    f"{location.uri(chosen[0])}; name the file to read it"
                )
            found = replace(found, names=names)
    return found


def _found_in_folder(
    cache: ShardCache, listed: Sequence[str] | None, pattern: str
) -> dict[str, StoredObject]:
    folder, names, meant = cache.folder, list(listed or ()), set(listed or ())
    names += [mask for name in meant if (mask := mask_of(name)) is not None]
    if listed is None:
        walk = walk_linked(folder) if folder.is_dir() else iter(())
        # The name of a file, or a prefix, is of the folder itself, whatever is below it.
        for where, _, here in islice(walk, None if GLOB & set(pattern) or not pattern else 1):
            inside = os.path.relpath(where, folder)
            below = "" if inside == "." else f"{inside}/"
            names += [f"{below}{name}" for name in here if not f"{below}{name}".startswith(".")]
        meant = set(matching(names, pattern))
    found = {}
    for name in names:
        path = folder / name
        state = cache.file_state(path)
        if state is None or not path.is_file():
            if name not in meant:
                continue
            raise DataError(f"{path}: does not exist, or is not a file; correct its name")
        found[name] = StoredObject(str(path), version_of(state), state.num_bytes)
    return found


def _found_in_store(
    cache: ShardCache, listed: Sequence[str] | None, pattern: str
) -> dict[str, StoredObject]:
    location, start = cache.location, len(f"{cache.location.remote}/")
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


def open_files(source: Any, found: FoundFiles) -> list[tuple[TokenFile, VirtualShards]]:
    """Open token files, and cut them; errors as of `open_flat`."""
    if source.unit == "sequence" and found.form.name in ("olmo", "datatrove", "arrow"):
        raise ConfigError(
            f"unit='sequence': {found.form.name} has documents alone; omit it, as it is for "
            "Megatron's files"
        )
    open_one = partial(open_found, source, found)
    if not found.cache.is_remote:
        return list(map(open_one, found.names))
    if source.index is None and found.form.name == "arrow":
        files = source.files if isinstance(source.files, str) else " ".join(source.files)
        raise ConfigError(
            f"files={source.files!r}: the boundaries of Arrow files are between their tokens, so "
            f"they would be fetched whole to be planned; run `streampack index {files} --format "
            "arrow --out FOLDER` once, and set TokenFiles(files, index=FOLDER)"
        )
    with ThreadPoolExecutor(OPENING_THREADS) as threads:
        return list(threads.map(open_one, found.names))


def open_found(source: Any, found: FoundFiles, name: str) -> tuple[TokenFile, VirtualShards]:
    """Return one token file with its virtual shards; errors as of `open_flat`."""
    file, uri = found.file(name), found.cache.location.uri(name)
    columns = ColumnSelection.of(source)
    dtype = source.dtype or columns.tokens_dtype
    with as_data_error(Path(uri), is_retried=False), tables_mapped():
        if source.index is None:
            options = Options(
                tokens=token_names(columns.tokens),
                dtype=dtype,
                unit=source.unit,
                ignores_trailing=source.trailing == "ignore",
            )
            opened = found.form.open(file, options)
        else:
            index = local_path(source.index, "index")
            opened = open_documents(name, file.num_bytes, index, split_at=source.split_at)
        shards = opened.cut(0, opened.boundaries.num_samples)
        first, last = shards.extents.min(initial=file.num_bytes), shards.extents.max(initial=0)
        if not first and last < file.num_bytes:  # a header may be what is too long
            check_start(name, found.start_of(name))
    if dtype not in (None, opened.dtype):
        raise ConfigError(
            f"dtype={dtype!r}: {uri} has tokens of {opened.dtype}; omit dtype, or correct it"
        )
    return opened if file.version is None else replace(opened, version=file.version), shards


def _cut(
    opened: Sequence[tuple[TokenFile, VirtualShards]],
    source: Any,
    held: HeldOut | None,
    name: str,
) -> tuple[VirtualShards, SamplePart | None]:
    """Return the virtual shards of files, of the samples that are chosen."""
    counts = [file.boundaries.num_samples for file, _ in opened]
    first, stop = 0, sum(counts)
    if not stop:
        raise DataError(f"stream {name!r}: its token files have no documents; make new copies")
    if source.only is not None:
        first, stop = chosen_part(source.only, stop, "samples", name)
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
    numbers, part = chosen_shards(held, numbering, name)
    return shards.take(numbers), part


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
