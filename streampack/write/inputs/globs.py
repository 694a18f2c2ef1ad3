"""Globs over paths and URLs, with one set of rules for this machine and for stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from streampack.stores.objects import Found

MAGIC = re.compile(r"[*?[]")
SLASH = re.compile("/")
MARKERS = {"_SUCCESS", "_metadata", "_common_metadata"}


@dataclass(frozen=True, slots=True)
class Listing:
    """Files that an input names."""

    folder: str | None
    """The folder that they are in, if the input or a match of its glob is one; else None."""
    files: list[Found] = field(default_factory=list)
    """Files in the order of their names, hidden ones left out."""


def glob_pattern(uri: str) -> re.Pattern[str]:
    """Return a pattern for a glob: `*` and `?` stay in a folder, `**` crosses folders.

    >>> pattern = glob_pattern("s3://b/**/part-[0-9]*.jsonl")
    >>> [bool(pattern.fullmatch(uri)) for uri in ("s3://b/x/y/part-1.jsonl", "s3://b/part-x.jsonl")]
    [True, False]
    """
    text, position = "", 0
    for match in re.finditer(r"\*\*/|\*+|\?|\[!?[^\]]+\]", uri):
        text += re.escape(uri[position : match.start()])
        token = match[0]
        if token == "**/":
            text += "(?:.*/)?"
        elif token in ("*", "?"):
            text += f"[^/]{token.replace('?', '')}"
        else:
            text += ".*" if token.startswith("*") else token.replace("[!", "[^")
        position = match.end()
    return re.compile(text + re.escape(uri[position:]), re.DOTALL)


def is_hidden(name: str) -> bool:
    """Return whether a path below a folder is hidden, or a marker that a writer left.

    >>> [is_hidden(name) for name in (".git/x", "a/.x.crc", "_SUCCESS", "a/_x.jsonl")]
    [True, True, True, False]
    """
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) or parts[-1] in MARKERS


def match_glob(glob: str, uris: Iterable[str], found: Callable[[str], Found]) -> list[Listing]:
    """Return those of some files that a glob matches, or that are in folders that it matches.

    >>> uris = ["in/a.txt", "in/b/c.txt", "in/b/d/e.txt", "in/.git/f.txt", "in/_SUCCESS"]
    >>> for listing in match_glob("in/*", uris, lambda uri: Found(uri, "v", 1)):
    ...     print(listing.folder, [file.url for file in listing.files])
    None ['in/a.txt']
    in/b ['in/b/c.txt', 'in/b/d/e.txt']
    """
    pattern = glob_pattern(glob.rstrip("/"))
    below = MAGIC.split(glob)[0].rfind("/") + 1  # after the last folder without wildcards
    listings: dict[str | None, Listing] = {}
    for uri in sorted(set(uris)):
        parents = (uri[: match.start()] for match in SLASH.finditer(uri, below))
        folder = next(filter(pattern.fullmatch, parents), None)
        if not is_hidden(uri[below:]) and (folder is not None or pattern.fullmatch(uri)):
            listings.setdefault(folder, Listing(folder)).files.append(found(uri))
    return list(listings.values())
