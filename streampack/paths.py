"""What a path names: a folder on this machine, or a place in a store.

::

    data/code    ~/code    /data/code    file:///data/code      folders
    s3://bucket/code    dbfs:/Volumes/code                      URLs of stores

Cost: none; nothing is looked at.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

__all__ = ["folder_of", "home_path", "is_url"]

URL = re.compile(r"[A-Za-z][\w+.-]+:/")  # of two letters or more: one is a drive


def home_path(path: str | os.PathLike[str]) -> str:
    """Return a path whose `~`, which no shell may have read, is the home folder.

    >>> home_path("data/~code")
    'data/~code'
    """
    return os.path.expanduser(os.fspath(path))


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, also where a Path has taken one of its slashes.

    >>> [is_url(path) for path in ("s3://bucket/code", "dbfs:/Volumes/code", "s3:/bucket", "code")]
    [True, True, True, False]
    """
    return URL.match(os.fspath(path)) is not None


def folder_of(remote: str) -> str | None:
    """Return the folder on this machine that a stream's `remote` names; None: it is in a store.

    >>> folder_of("file:///data/my%20code"), folder_of("code"), folder_of("s3://bucket/code")
    ('/data/my code', 'code', None)
    """
    if remote.startswith("file://"):
        return unquote(urlsplit(remote).path)
    return None if is_url(remote) else home_path(remote)
