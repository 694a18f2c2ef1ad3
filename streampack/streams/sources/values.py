"""Checks of the options that several sources have: paths, slices and columns."""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from streampack._checks import check_choice, convert_fields, read_token_id
from streampack._paths import folder_of, local_path, shown_path
from streampack.config.combinations import check_combination
from streampack.config.download import Download
from streampack.errors import ConfigError, short_text
from streampack.storage.mosaicml import MOSAICML_SCHEMES
from streampack.stores.drivers import PACKAGES, is_known
from streampack.streams.column_selection import ColumnSelection
from streampack.texts.transform import Transform

COLUMNS = ("tokens", "labels", "loss_mask", "text", "chat")
OF_ROWS = (".parquet", ".jsonl", ".json")


def is_path(value: object) -> bool:
    """Return whether a value is the text or the object of a path."""
    return isinstance(value, str | os.PathLike)


def is_paths(value: Any) -> bool:
    """Return whether a value is a path, or a list of paths."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_path(value) or (is_list and all(map(is_path, value)))


def in_memory(source: Any) -> list[str]:
    """Return the options of a source that hold what is in memory, and no path."""
    names = [name for name in ("files", "tokenizer") if hasattr(source, name)]
    return [
        name
        for name in names
        # A list of texts looks like one of paths.
        if not (is_path(value := getattr(source, name)) or (len(names) == 1 and is_paths(value)))
    ]


def without_memory(stream: Any) -> Any:
    """Return a copy of a stream without a client, and without what its source has in memory."""
    stream = copy.copy(stream)
    if hasattr(stream, "_downloader"):
        stream._downloader = None
    source = getattr(stream, "source", None)
    for name in in_memory(source):
        stream.source = copy.copy(stream.source)
        object.__setattr__(stream.source, name, type(getattr(source, name)))
    return stream


def default_name(files: Any) -> str:
    """Return the name of a stream of files or rows that has none of its own."""
    return Path(os.fspath(files)).name.partition(".")[0] or "rows" if is_path(files) else "rows"


def names_rows(file: Any) -> bool:
    """Return whether a path is that of a file of rows."""
    return str(file).removesuffix(".gz").removesuffix(".zst").endswith(OF_ROWS)


def read_remote(name: str, remote: str | os.PathLike[str]) -> str:
    """Return the text of a path or URL that something here can fetch from."""
    remote = folder_of(shown_path(remote)) or shown_path(remote)
    scheme = urlsplit(remote).scheme  # as in MosaicML: whatever precedes a colon
    if scheme and scheme not in MOSAICML_SCHEMES and not is_known(scheme):
        known = ", ".join(f"{name}:" for name in sorted((*MOSAICML_SCHEMES, *PACKAGES)))
        raise ConfigError(
            f"{name}={remote!r}: nothing can fetch from {scheme}:; a remote is a folder, or a "
            f"URL with {known} or file:; copy the files to one of these"
        )
    return remote


def check_source(source: Any, of_only: str = "samples") -> None:
    """Check and keep the options that several sources have; `of_only` is what `only` selects."""
    check_combination({field.name: getattr(source, field.name) for field in fields(source)})
    if hasattr(source, "on_bad_row"):
        check_choice("on_bad_row", source.on_bad_row, Literal["error", "skip"])
    _check_columns(source)
    if hasattr(source, "split_at"):
        convert_fields(source, read_token_id, "split_at")
    if source.only is not None and not isinstance(source.only, slice):
        raise ConfigError(
            f"only={source.only!r:.80} is not a slice of {of_only}; write slice(0, 10), or "
            "slice(10, None) for those from the tenth on"
        )
    download = getattr(source, "download", None)
    if download is not None and not isinstance(download, Download):
        raise ConfigError(
            f"download={short_text(download)} is not a Download; write Download(retry=5), for "
            "example"
        )
    if source.local is not None:
        if not is_path(source.local):
            raise ConfigError(f"local={short_text(source.local)} is not a path; write one folder")
        way_out = "set remote= to it, and local= to a folder"
        object.__setattr__(source, "local", str(local_path(source.local, "local", way_out)))
    if hasattr(source, "files"):
        _read_files(source)


def check_texts(source: Any) -> None:
    """Check and keep the options of a source of texts or conversations."""
    check_source(source)
    if source.lengths is not None:
        check_choice("lengths", source.lengths, Literal["eager", "lazy"])
    if callable(source.transform):  # as YAML has it
        object.__setattr__(source, "transform", Transform.of(source.transform).name)


def _check_columns(source: Any) -> None:
    for name in COLUMNS:
        if not isinstance(value := getattr(source, name, None), str | None):
            raise ConfigError(f"{name}={short_text(value)} is not the name of a column; write one")
    if not hasattr(source, "labels"):
        return
    ColumnSelection.of(source)
    if source.labels_shifted is not None and source.labels is None:
        raise ConfigError(
            f"labels_shifted={source.labels_shifted} describes a labels column, but labels=None; "
            "set labels= to its name, or omit labels_shifted"
        )


def _read_files(source: Any) -> None:
    files, form = source.files, getattr(source, "format", None)
    if is_path(files):
        object.__setattr__(source, "files", read_remote("files", files))
    elif is_paths(files) and form is None and all(map(names_rows, files)):
        raise ConfigError(
            f"files={short_text(files)}: a list must have rows, not names of files; name the files "
            "by a glob, such as 'rows/*.jsonl', or write texts as [{'text': ...}, ...]"
        )
    elif is_paths(files) and not hasattr(source, "tokenizer"):
        object.__setattr__(source, "files", tuple(read_remote("files", each) for each in files))
