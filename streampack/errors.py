"""Every error that streampack raises on purpose, by where the fix is.

::

    StreampackError
    ├── ConfigError   the arguments or the YAML
    ├── DataError     the stored bytes, or access to them
    │   ├── BadRowsError   more bad rows of an input than may be skipped
    │   └── DamagedInputError   an input file that cannot be decoded
    ├── ResumeError   a state and a dataset that do not belong together
    └── WorkerError   a process, thread or rank that died: the machine

``ConfigError`` is also a ``ValueError``, so pydantic reports it as a validation error.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from reprlib import repr as short_repr


class StreampackError(Exception):
    """Base class of all errors defined by streampack."""


class ConfigError(StreampackError, ValueError):
    """An argument or config that cannot work. The message names the value, the limit and a fix.

    Args:
        message: The problem, the limit, and a fix.
        option: The argument that is wrong, if it is a single one. It has the same name in Python,
            as a key of a YAML config, and as an option of the command line: `num_workers` is
            `--num-workers`.

    >>> ConfigError("num_workers=-1 must be at least 0; omit it", option="num_workers").option
    'num_workers'
    """

    def __init__(self, message: str = "", *, option: str | None = None) -> None:
        # A single positional argument: torch re-creates a worker's error from its text alone, and
        # pickle restores the attributes from __dict__.
        super().__init__(message)
        self.option = option


class DataError(StreampackError):
    """Stream data that is unavailable or corrupt.

    The message names the stream, shard or sample. The attributes describe the file and the failed
    download; each is None where it does not apply.

    Args:
        message: The problem, the limit, and a fix.
        uri: Location of the file: a URL or a path.
        shard: Path of the file relative to the stream's folder.
        attempts: Number of download attempts.
        elapsed_s: Duration of all attempts, in seconds.

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
        super().__init__(message)  # a single positional argument, as in ConfigError
        self.uri = uri
        self.shard = shard
        self.attempts = attempts
        self.elapsed_s = elapsed_s


class BadRowsError(DataError):
    """More rows of an input that cannot become samples than may be skipped."""


class DamagedInputError(DataError):
    """An input file that cannot be decoded from some byte on."""


class ResumeError(StreampackError):
    """A state that does not belong to this dataset, or a position that cannot be determined."""


class WorkerError(StreampackError):
    """A worker process that died, a thread without a result, or another rank that failed."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``" - did you mean 'x'?"`` for the known word nearest to `word`, or an empty string.

    >>> suggest("stratfied", ["random", "stratified"])
    " - did you mean 'stratified'?"
    """
    near = get_close_matches(str(word), list(known), n=1)
    return f" - did you mean {near[0]!r}?" if near else ""


@contextmanager
def naming_limits(way_out: str = "") -> Iterator[None]:
    """Raise a ConfigError that names the limit when the system is out of files or threads.

    Raises:
        ConfigError: If this process is out of file descriptors, or no thread or process can be
            started. Its message ends with `way_out`, such as ", or set prefetch_threads=0".
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise_if_limited(error, way_out)
        raise


def raise_if_limited(error: OSError | RuntimeError, way_out: str = "") -> None:
    """Raise the ConfigError of `naming_limits` if that is what `error` says."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(
            f"no file descriptor is left ({error}); a process may have {soft} here, and {hard} "
            "at most: raise the limit (`ulimit -n`, LimitNOFILE= of a service), close files, "
            f"or use fewer workers{way_out}"
        ) from error
    is_process = isinstance(error, BlockingIOError)
    if is_process or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        raise ConfigError(
            f"no {'process' if is_process else 'thread'} can be started ({error}); all processes "
            f"of this user may have {soft} threads here, and {hard} at most (-1: unlimited), a "
            "container may have fewer, and each needs memory: raise the limit (`ulimit -u`, "
            f"pids.max of a cgroup), or run fewer processes{way_out}"
        ) from error


def short_text(value: object) -> str:
    """Return a short repr: strings and numbers by value, other objects by their type."""
    if isinstance(value, str | int | float | slice | None) or type(value) is dict:
        return short_repr(value)
    return value.__name__ if isinstance(value, type) else f"<{type(value).__name__}>"
