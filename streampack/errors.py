"""Every error that streampack raises on purpose, by who can mend it.

::

    StreampackError
    ├── ConfigError   the arguments or the YAML: whoever wrote them
    ├── DataError     the bytes at rest, or the way to them: whoever keeps the stream
    ├── ResumeError   a state and a dataset that do not belong together
    └── WorkerError   a process that died: whoever runs the machine

``ConfigError`` is a ``ValueError`` too: pydantic, and callers who catch that, see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "ConfigError",
    "DataError",
    "ResumeError",
    "StreampackError",
    "WorkerError",
    "suggest",
]


class StreampackError(Exception):
    """The root of the family: catch it to catch all of streampack's own errors."""


class ConfigError(StreampackError, ValueError):
    """An argument or a config that cannot work; it names the value, the limit and the way out."""


class DataError(StreampackError):
    """A stream whose bytes cannot be had, or are not what they should be.

    The text names stream, shard or sample. Which file it is about, and what a failed download took,
    is kept beside it; None where there was no such thing.

    Args:
        message: What is wrong, the limit, and the way out.
        uri: Where the file is: a url, or a path.
        shard: Its path under the stream's folder.
        attempts: How often it was asked for.
        elapsed_s: How long that took, in seconds.

    >>> DataError("s3://bucket/shard.00000.mds: no answer", attempts=3, elapsed_s=180.0).attempts
    3
    """

    def __init__(
        self,
        message: str = "",
        *,
        uri: str | None = None,
        shard: str | None = None,
        attempts: int | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        # One positional argument: torch makes a worker's error anew from its text, and pickle
        # restores the attributes on its own.
        super().__init__(message)
        self.uri = uri
        self.shard = shard
        self.attempts = attempts
        self.elapsed_s = elapsed_s


class ResumeError(StreampackError):
    """A state that does not belong to this dataset, or a position that nobody here can know."""


class WorkerError(StreampackError):
    """A worker process that died, or a thread's work that ended without a result."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``" - did you mean 'x'?"`` for the known word nearest to `word`, or nothing.

    >>> suggest("stratfied", ["random", "stratified"])
    " - did you mean 'stratified'?"
    >>> suggest("qqq", ["random", "stratified"])
    ''
    """
    near = get_close_matches(str(word), list(known), n=1)
    return f" - did you mean {near[0]!r}?" if near else ""
