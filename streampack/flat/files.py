"""The token files of a stream: which ones there are, their order, format and tables.

::

    "data/"   "data/web_text_document"   "data/*.npy"   ["a.ds", "b.ds"]   s3://bucket/data/
        '--> names, sorted, a list in its own order --> format by their endings --> TokenFile each
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from streampack.errors import ConfigError, DataError
from streampack.flat.arrow import open_arrow
from streampack.flat.datatrove import open_datatrove
from streampack.flat.megatron import open_megatron
from streampack.flat.olmo import open_olmo
from streampack.flat.token_file import TokenFile

ENTRY_POINTS = "streampack.formats"
DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
GLOB = frozenset("*?[")
INDEX_IT = (
    "find the ends once with `streampack index FILES --eos-id ID --tokens-dtype TYPE "
    "--out FOLDER`, and set Stream(index=FOLDER)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a `Stream` says about its token files."""

    tokens: tuple[str, ...]
    """Names of the column of tokens, for formats with columns."""
    dtype: str | None
    """Type of the tokens, for formats that do not state it."""
    unit: str
    """"document" or "sequence"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A token file, and the files that describe it."""

    name: str
    """Its path below the root."""
    num_bytes: int
    path_of: Callable[[str], Path | None]
    """Returns the path on this disk of another file below the root, which it fetches if necessary;
    None without one."""
    version: str | None = None

    def table(self, name: str, way_out: str = "copy it too") -> Path:
        """Return the path on this disk of a file that says where documents end.

        Raises:
            DataError: If there is none.
        """
        path = self.path_of(name)
        if path is None:
            raise DataError(
                f"{self.name}: has no {name}, which says where its documents end; {way_out}"
            )
        return path


class TokenFormat(Protocol):
    """A format of token files. Register one of your own as an entry point `streampack.formats`."""

    name: str
    suffix: str
    """The ending of files with tokens."""

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        """Return the type of a file's tokens, and where its documents begin.

        Raises:
            DataError: If a table is missing or damaged.
        """


class Megatron:
    """`.bin` with `.idx`."""

    name, suffix = "megatron", ".bin"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        path = file.table(file.name.removesuffix(".bin") + ".idx")
        return open_megatron(file.name, file.num_bytes, path, unit=options.unit)


class Datatrove:
    """`.ds` with `.ds.index`."""

    name, suffix = "datatrove", ".ds"

    def open(self, file: FoundFile, options: Options) -> TokenFile:  # noqa: ARG002
        if file.path_of(f"{file.name}.loss") is not None:
            raise DataError(
                f"{file.name}: has a loss mask, {file.name}.loss, which cannot be read, and "
                "without it all tokens would be learned; remove it if that is right, or write a "
                "stream with a loss_mask column"
            )
        path = file.table(f"{file.name}.index", "write it with save_index=True")
        metadata = file.path_of(f"{file.name}.metadata")
        return open_datatrove(file.name, file.num_bytes, path, metadata)


class Olmo:
    """`.npy` without a header, with `.csv.gz`."""

    name, suffix = "olmo", ".npy"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        if options.dtype is None:
            raise ConfigError(
                f"{file.name}: the type of its tokens is in no file; set tokens_dtype='uint16' or "
                "'uint32', as in the config that wrote it"
            )
        stem = file.name.removesuffix(".npy")
        path = file.path_of(f"{file.name}.csv.gz") or file.table(f"{stem}.csv.gz", INDEX_IT)
        return open_olmo(file.name, file.num_bytes, path, dtype=options.dtype)


class Arrow:
    """`.arrow`, as `Dataset.save_to_disk` writes it."""

    name, suffix = "arrow", ".arrow"

    def open(self, file: FoundFile, options: Options) -> TokenFile:
        return open_arrow(file.name, file.table(file.name), options.tokens)


FORMATS: tuple[TokenFormat, ...] = (Megatron(), Datatrove(), Olmo(), Arrow())


def format_named(name: str | TokenFormat) -> TokenFormat:
    """Return a format by its name: one of ours, or one that an entry point registers.

    A format is returned as it is.

    Raises:
        ConfigError: If the name is unknown.
    """
    if not isinstance(name, str):
        return name
    for known in FORMATS:
        if known.name == name:
            return known
    found = entry_points(group=ENTRY_POINTS)
    for entry in found:
        if entry.name == name:
            registered: TokenFormat = entry.load()()
            return registered
    names = ["mds", "litdata", *(each.name for each in FORMATS), *(entry.name for entry in found)]
    raise ConfigError(f"format={name!r}: is not one of {', '.join(names)}; write one of them")


def choose(
    names: Sequence[str], where: str, form: TokenFormat | None
) -> tuple[TokenFormat, list[str]]:
    """Return the format of files by their endings, and the token files among them, in order.

    Raises:
        ConfigError: If none of the files has a known ending, or several kinds have.
    """
    kinds = FORMATS if form is None else (form,)
    found = {kind: [name for name in names if name.endswith(kind.suffix)] for kind in kinds}
    found = {kind: chosen for kind, chosen in found.items() if chosen}
    if len(found) == 1:
        return next(iter(found.items()))
    shown = ", ".join(f"{kind.name} ({len(chosen)} files)" for kind, chosen in found.items())
    endings = ", ".join(f"{kind.suffix} ({kind.name})" for kind in kinds)
    raise ConfigError(
        f"{where}: has files of {shown}; say which with format=, in a stream for each"
        if found
        else f"{where}: none of its {len(names)} files ends in {endings}; name the folder, file, "
        "prefix or glob of the token files"
    )


def split_source(source: str | Sequence[str]) -> tuple[str, list[str] | None, str]:
    """Return the folder of a source, the names in it if they are listed, and a pattern or prefix.

    >>> split_source("data/part-*.npy")
    ('data', None, 'part-*.npy')
    >>> split_source(["data/a/0.ds", "data/b/0.ds"])
    ('data', ['a/0.ds', 'b/0.ds'], '')
    """
    if not isinstance(source, str):
        texts = [os.fspath(each) for each in source]
        folders = [os.path.dirname(text) for text in texts]
        root = folders[0]
        while any(not f"{folder}/".startswith(f"{root}/") for folder in folders) and "/" in root:
            root = os.path.dirname(root)
        return root, [text[len(root) + 1 :] if root else text for text in texts], ""
    parts = source.rstrip("/").split("/")
    first = next((n for n, part in enumerate(parts) if GLOB & set(part)), None)
    if first is not None:
        return "/".join(parts[:first]) or ".", None, "/".join(parts[first:])
    if os.path.isdir(source) or source.endswith("/"):
        return source.rstrip("/"), None, ""
    return "/".join(parts[:-1]) or ".", None, parts[-1]


def matches(name: str, pattern: str) -> bool:
    """Return whether a name below a root is meant by a pattern, a prefix, a file or a folder.

    >>> matches("part-0.npy", "part-*.npy"), matches("web.bin", "web"), matches("web2.bin", "web")
    (True, True, False)
    """
    if GLOB & set(pattern):
        return fnmatchcase(name, pattern)
    return not pattern or name == pattern or name.startswith((f"{pattern}.", f"{pattern}/"))


def order_of_dataset(names: list[str], text: bytes) -> list[str]:
    """Return the Arrow files of a dataset in the order of its state.json.

    Raises:
        DataError: If state.json names a file that is not there.
    """
    try:
        listed = [str(entry["filename"]) for entry in json.loads(text)["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{DATASET_STATE}: does not list the files of a dataset ({error!r}); save it again"
        ) from error
    missing = sorted(set(listed) - set(names))
    if missing or not listed:
        raise DataError(
            f"{DATASET_STATE}: names {missing[:1]}, which is missing; copy the whole dataset"
        )
    return listed
