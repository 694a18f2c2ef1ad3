"""What a path on the command line is: a folder on this machine, or the URL of a remote stream.

::

    /data/code    folder          s3://bucket/code    dbfs:/Volumes/code    file:///data/code    URL

Cost: none.
"""

from __future__ import annotations

__all__ = ["is_url"]


def is_url(path: str) -> bool:
    """Whether a path is a URL, as a stream's `remote` takes it.

    >>> is_url("s3://bucket/code"), is_url("dbfs:/Volumes/code"), is_url("code")
    (True, True, False)
    """
    return "://" in path or path.startswith("dbfs:/")
