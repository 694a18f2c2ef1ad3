"""Listing of inputs: files, folders, globs, URLs and dataset folders of Hugging Face.

::

    data/                     every file below it and below its links, by name, except hidden ones
    data/2026-*               the files that match, and those below folders that match
    saved/                    save_to_disk: its .arrow files
    ~/.cache/.../<hash>/      cache of `datasets`: without the cache-*.arrow files of map and filter
    datasets--org--name/      cache of the hub: refused; the message names the folder of a revision

Files have canonical names, absolute and without links, so that a file is known under any spelling.
A name's suffixes say its format. Others are refused: a settings file would be trained on as text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import PurePosixPath

from streampack._paths import folder_of, is_url, real_path, shown_path
from streampack.errors import DataError
from streampack.stores.objects import StoredObject
from streampack.texts.inputs.shards import folder_of_shards, index_of_shards, shard_slices
from streampack.texts.inputs.slices import WHOLE, Compression, Format, InputSlice
from streampack.texts.inputs.sources import MAGIC, Listing, find_input

FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
TABLES = ("parquet", "arrow")
"""Formats with column types and a compression of their own; pyarrow reads them."""

# What a dataset folder has next to its tables.
DESCRIPTIONS = re.compile(
    r"(?:.*/)?(?:README\.md|LICENSE[^/]*|dataset_dict\.json|dataset_infos?\.json|state\.json)"
)
# Files that map, filter and an interrupted download leave in the cache of `datasets`.
DERIVED = re.compile(
    r"(?:.*/)?(?:cache-[0-9a-f]{16}[^/]*\.arrow|tmp\w{8}|[^/]*\.lock|[^/]*\.incomplete)"
)
# What `streampack index` writes, which may be next to the data.
INDEX = re.compile(r"(?:.*/)?(?:rows|lengths)\.npz")
SHARD = re.compile(r"(?:.*/)?([^/]*?)-\d{5}-of-\d{5}\.(?:parquet|arrow)")
SPLIT = re.compile(r"(?:.*[-_.])?(train|validation|valid|val|dev|test|eval)")


def list_inputs(inputs: Sequence[str]) -> list[InputSlice]:
    """Return the whole files that inputs name, in order; those of an input are sorted by name.

    A DataError says that an input names no file, a file has an unsupported suffix or is named
    twice, or a dataset folder has several splits.
    """
    files: dict[str, InputSlice] = {}
    for uri in inputs:
        shown = shown_path(uri)
        path = folder_of(shown) or shown
        shards_only = None if is_url(path) else folder_of_shards(path)
        listings = find_input(path) if shards_only is None else [shards_only]
        # Only a folder of this machine can exist without a file.
        if not any(one.files or (one.folder and not is_url(path)) for one in listings):
            text = "does not exist; check the path"
            if MAGIC.search(path):
                text = "matches 0 files; check the pattern, and quote it against the shell"
            elif is_url(path):
                text = "0 files; check the URL, and the access to it"
            raise DataError(f"{path}: {text}", uri=path)
        shards: list[InputSlice] = []
        found: list[StoredObject] = []
        for listing in listings:
            if index := index_of_shards(listing):
                shards += shard_slices(index)
            else:
                found += with_rows(listing)
        plain = sorted(found, key=lambda file: file.url)
        for file in chain(shards, _input_files(uri, plain) if plain or not shards else ()):
            if file.uri in files:
                raise DataError(
                    f"{file.uri}: is named twice (again by {uri}); name it once, and give its "
                    "stream a higher weight to train on it more often",
                    uri=file.uri,
                )
            files[file.uri] = file
    if not files:
        raise DataError(f"{', '.join(inputs)}: 0 files; name files of rows or text")
    return list(files.values())


def _input_files(uri: str, found: Sequence[StoredObject]) -> list[InputSlice]:
    files, others = [], []
    for file in found:
        formats = format_of(file.url)
        if formats is None:
            others.append(file.url)
        else:
            name = file.url if is_url(file.url) else canonical_path(file.url)
            files.append(InputSlice(name, file.version, *formats, 0, WHOLE, file.num_bytes))
    if others:
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        way_out = "rename it if it is one of them"
        if others[0].lower().endswith(tuple(COMPRESSIONS)):
            way_out = "decompress it if it is one of them"
        raise DataError(
            f"{others[0]}{more}: is not a supported file; supported are {', '.join(FORMATS)}, and "
            f"all but {' and '.join(TABLES)} with .gz or .zst too; {way_out}, "
            "or omit it: name the files to read instead of their folder",
            uri=others[0],
        )
    if not files:
        raise DataError(f"{uri}: 0 files in this folder; name one that has files of rows or text")
    return files


def canonical_path(path: str) -> str:
    """Return the absolute path of a file without links, unless only a link has its suffixes."""
    real = real_path(path)
    if format_of(real) == format_of(path):
        return real
    folder, name = os.path.split(path)  # such as one in a cache of the hub
    return os.path.join(real_path(folder), name)


def with_rows(listing: Listing) -> list[StoredObject]:
    """Return the files that may have rows, of a folder only those of a dataset or a repository.

    A DataError says that the folder has several splits, or several revisions.
    """
    if listing.folder is None:
        return listing.files
    folder = listing.folder.rstrip("/")
    files = {file.url[len(folder) + 1 :]: file for file in listing.files}
    files = {name: file for name, file in files.items() if not INDEX.fullmatch(name)}
    # The folder of a repository in the cache of the hub has files of all revisions.
    snapshots = sorted({name.split("/")[1] for name in files if name.startswith("snapshots/")})
    if snapshots:
        raise DataError(
            f"{folder}: is a cache of the hub, and has the files of the revisions "
            f"{', '.join(snapshots)}; name one: '{folder}/snapshots/{snapshots[0]}'",
            uri=folder,
        )
    formats = {name: format_of(name) for name in files}
    if not any(found and found[0] in TABLES for found in formats.values()):
        return list(files.values())
    files = {
        name: file
        for name, file in files.items()
        if not DESCRIPTIONS.fullmatch(name) and not DERIVED.fullmatch(name)
    }
    _check_splits(folder, listing, files)
    return list(files.values())


def _check_splits(folder: str, listing: Listing, files: dict[str, StoredObject]) -> None:
    all_names = {found.url[len(folder) + 1 :] for found in listing.files}
    globs: dict[str, str] = {}
    for name, file in files.items():
        first, _, rest = name.partition("/")
        shard = SHARD.fullmatch(name)
        stem = shard[1] if shard else name.rpartition("/")[2].rpartition(".")[0]
        split = SPLIT.fullmatch(stem)
        if "dataset_dict.json" in all_names and rest:
            globs.setdefault(first, f"{folder}/{first}")
        elif split and (shard or "dataset_info.json" in all_names):
            parent = file.url.rpartition("/")[0]
            globs.setdefault(split[1], f"{parent}/*{split[1]}*{name[name.rindex('.') :]}")
    if len(globs) > 1:
        first = globs.get("train", next(iter(globs.values())))
        raise DataError(
            f"{folder}: has the splits {', '.join(globs)}; name one of them: '{first}'",
            uri=folder,
        )


def format_of(name: str) -> tuple[Format, Compression | None] | None:
    """Return a file's format and compression; None if its suffix is not supported.

    >>> format_of("s3://bucket/rows.JSONL.zst"), format_of("a.parquet"), format_of("a.parquet.gz")
    (('jsonl', 'zst'), ('parquet', None), None)
    """
    path = PurePosixPath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    found = FORMATS.get(PurePosixPath(path.stem).suffix if compression else path.suffix)
    if found is None or (compression and found in TABLES):
        return None
    return found, compression
