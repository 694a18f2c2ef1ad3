"""The token files of a stream: which ones there are, their order, format and tables.

::

    "data/"   "data/web_text_document"   "data/*.npy"   ["a.ds", "b.ds"]   s3://bucket/data/
        '--> names, sorted, a list in its own order --> format by their endings --> TokenFile each
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import entry_points

from streampack._paths import is_url
from streampack.errors import ConfigError, DataError
from streampack.flat.arrow import Arrow
from streampack.flat.datatrove import Datatrove
from streampack.flat.megatron import Megatron
from streampack.flat.olmo import Olmo
from streampack.flat.token_file import TokenFormat
from streampack.mds.index import INDEX_FILE

ENTRY_POINTS = "streampack.formats"
DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
GLOB = frozenset("*?[")
TOKEN_IDS, LABELS_MASK = "token_ids", "labels_mask"  # as open-instruct names them


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
    names = [*(each.name for each in FORMATS), *(entry.name for entry in found)]
    raise ConfigError(f"format={name!r}: is not one of {', '.join(names)}; write one of them")


def names_token_files(path: str | os.PathLike[str]) -> bool:
    """Return whether a path that is not a folder is a glob, or ends as token files do.

    >>> names_token_files("s3://bucket/*.npy"), names_token_files("s3://bucket/web")
    (True, False)
    """
    text = os.fspath(path)
    is_glob = bool(GLOB & set(os.path.basename(text)))
    is_named = is_glob or text.endswith(tuple(each.suffix for each in FORMATS))
    return is_named and not os.path.isdir(text)


def is_flat(source: str | Sequence[str], form: str | None) -> bool:
    """Return whether a path is of token files rather than of shards with an index.json."""
    if not isinstance(source, str) or form is not None or names_token_files(source):
        return True
    return not (is_url(source) or os.path.exists(os.path.join(source, INDEX_FILE)))


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
        kind, chosen = next(iter(found.items()))
        masks = set(map(mask_of, chosen))
        return kind, [name for name in chosen if name not in masks]
    shown = ", ".join(f"{kind.name} ({len(chosen)} files)" for kind, chosen in found.items())
    endings = ", ".join(f"{kind.suffix} ({kind.name})" for kind in kinds)
    raise ConfigError(
        f"{where}: has files of {shown}; say which with format=, in a stream for each"
        if found
        else f"{where}: none of its {len(names)} files ends in {endings}; name the folder, file, "
        "prefix or glob of the token files"
    )


def mask_of(name: str) -> str | None:
    """Return the name that the loss mask of a token file has, if there is one.

    >>> mask_of("a/web.ds"), mask_of("a/token_ids_part_0.npy"), mask_of("web.npy")
    ('a/web.ds.loss', 'a/labels_mask_part_0.npy', None)
    """
    folder, basename = os.path.split(name)
    if basename.endswith(".ds"):
        return f"{name}.loss"
    if basename.startswith(TOKEN_IDS):
        return os.path.join(folder, LABELS_MASK + basename.removeprefix(TOKEN_IDS))
    return None


def split_source(source: str | Sequence[str]) -> tuple[str, list[str] | None, str]:
    """Return the folder of a source, the names in it if they are listed, and a pattern or prefix.

    >>> split_source("data/part-*.npy")
    ('data', None, 'part-*.npy')
    >>> split_source(["data/a/0.ds", "data/b/0.ds"])
    ('data', ['a/0.ds', 'b/0.ds'], '')

    Raises:
        ConfigError: If the files of a list are in several stores.
    """
    if not isinstance(source, str):
        texts = [os.fspath(each) for each in source]
        folders = [os.path.dirname(text) for text in texts]
        root = folders[0]
        while root.strip("/") and any(not _is_below(folder, root) for folder in folders):
            root = os.path.dirname(root)
        if (not root or root.endswith(":")) and any(map(is_url, texts)):
            raise ConfigError(
                f"{texts}: are in several stores; list the files of one store, in a Stream for each"
            )
        return root, [text.removeprefix(root).lstrip("/") if root else text for text in texts], ""
    if os.path.isdir(source):
        return source.rstrip("/"), None, ""
    parts = source.rstrip("/").split("/")
    first = next((n for n, part in enumerate(parts) if GLOB & set(part)), None)
    if first is not None:
        return "/".join(parts[:first]) or ".", None, "/".join(parts[first:])
    if source.endswith("/"):
        return source.rstrip("/"), None, ""
    return "/".join(parts[:-1]) or ".", None, parts[-1]


def _is_below(folder: str, root: str) -> bool:
    return f"{folder}/".startswith(f"{root.rstrip('/')}/")


def matching(names: Iterable[str], pattern: str, form: TokenFormat | None = None) -> list[str]:
    """Return the names below a root that are meant by a pattern, a prefix, a file or a folder.

    A prefix is a name without the ending of a format. Names may contain the characters of a
    pattern, so first it is compared as it is.

    >>> matching(["part-0.npy", "part-1.npy"], "part-*.npy"), matching(["a.bin", "a.1.bin"], "a")
    (['part-0.npy', 'part-1.npy'], ['a.bin'])
    >>> matching(["run[1]/0.npy", "run1/0.npy"], "run[1]")
    ['run[1]/0.npy']
    """
    names, inside = sorted(names), f"{pattern}/"
    whole = {pattern, *(pattern + each.suffix for each in (FORMATS if form is None else (form,)))}
    meant = [name for name in names if not pattern or name in whole or name.startswith(inside)]
    return meant or [name for name in names if fnmatchcase(name, pattern)]


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
