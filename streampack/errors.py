"""Every error that streampack raises on purpose, by who can mend it.

::

    StreampackError
    ├── ConfigError   the arguments or the YAML: whoever wrote them
    ├── DataError     the bytes at rest: whoever wrote the stream
    └── ResumeError   a state and a dataset that do not belong together

``ConfigError`` is a ``ValueError`` too: pydantic, and callers who catch that, see it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["ConfigError", "DataError", "ResumeError", "StreampackError", "suggest"]


class StreampackError(Exception):
    """The root of the family: catch it to catch all of streampack's own errors."""


class ConfigError(StreampackError, ValueError):
    """An argument or a config that cannot work; it names the value, the limit and the way out."""


class DataError(StreampackError):
    """A stream whose bytes are not what they should be; the text names stream, shard or sample."""


class ResumeError(StreampackError):
    """A state that does not belong to this dataset, or a position that nobody here can know."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``" - did you mean 'x'?"`` for the known word nearest to `word`, or nothing.

    >>> suggest("stratfied", ["random", "stratified"])
    " - did you mean 'stratified'?"
    >>> suggest("qqq", ["random", "stratified"])
    ''
    """
    near = get_close_matches(str(word), list(known), n=1)
    return f" - did you mean {near[0]!r}?" if near else ""
