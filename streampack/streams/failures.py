"""What a failed download means: whether to try again, and who can mend it.

::

    error --its causes--> HTTP status, kind of error --> permanent | denied | disk | passing
                          name of its class          --> no credentials

Each store has errors of its own, mostly wrapped in others: the whole chain is looked at. What is
not known to last is taken to pass.

Cost: none.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import Enum

__all__ = ["DamagedError", "Failure", "NoClientError", "kind_of", "status_of"]

DENIED = (401, 403)
MISSING = (404, 410)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# Words for a status, from stores whose errors carry no number.
STATUS_OF_WORD = {
    "AccessDenied": 403,
    "NOT_FOUND": 404,
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "PERMISSION_DENIED": 403,
}
# What is raised without asking the store, since there is nothing to ask it with: by botocore,
# google-auth, oci and azure-core. By name: whoever uses one of them need not have the others.
NO_CREDENTIALS = {
    "ClientAuthenticationError",
    "ConfigFileNotFound",
    "DefaultCredentialsError",
    "InvalidConfig",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
}
# What Hugging Face raises where the hub cannot be reached; a FileNotFoundError all the same.
UNREACHABLE = "LocalEntryNotFoundError"


class DamagedError(Exception):
    """Bytes that came whole as far as the store knows, and are not what they should be."""


class NoClientError(Exception):
    """There is no client for a remote: an unknown kind of store, or a library that is missing."""


class Failure(Enum):
    """Kinds of failure, by what can be done about them."""

    MISSING = "missing"
    """The store has no such object."""
    DENIED = "denied"
    """The store refuses; a client whose credentials are newer may be let in."""
    NO_CREDENTIALS = "no credentials"
    """The store was not even asked: nothing here says who asks."""
    DISK = "disk"
    """The local disk is full, or cannot be written."""
    BROKEN = "broken"
    """This installation cannot speak to such a store."""
    PASSING = "passing"
    """Anything else: it may go better at another time."""
    UNKNOWN = "unknown"
    """One of Python's own errors, such as KeyError, from a class that fetches in its own way."""


def kind_of(error: BaseException, place: str) -> Failure:
    """Tell what a failed download means.

    Args:
        error: What was raised.
        place: How the paths begin that the download writes to.

    >>> kind_of(FileNotFoundError("no such object"), "/local/x.tmp")
    <Failure.MISSING: 'missing'>
    >>> kind_of(ConnectionResetError("reset by peer"), "/local/x.tmp")
    <Failure.PASSING: 'passing'>
    """
    chain = list(_chain(error))
    status = status_of(error)
    if status is not None:
        return _kind_of_status(status)
    for each in chain:
        if type(each).__name__ == UNREACHABLE:
            return Failure.PASSING
        kind = _kind_of_type(each, place)
        if kind is not None:
            return kind
    is_own = all(type(each).__module__ == "builtins" for each in chain)
    is_network = any(isinstance(each, OSError | EOFError) for each in chain)
    return Failure.UNKNOWN if is_own and not is_network else Failure.PASSING


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error or one of its causes carries, if one does.

    >>> status_of(ConnectionResetError("reset by peer")) is None
    True
    """
    return next((s for s in map(_status_of, _chain(error)) if s is not None), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        hidden = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or hidden


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries: botocore, requests, azure, google, oci."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        word = str((response.get("Error") or {}).get("Code"))
        return status if isinstance(status, int) else STATUS_OF_WORD.get(word)
    for holder, name in (
        (response, "status_code"),
        (error, "status_code"),
        (error, "code"),
        (error, "status"),
    ):
        status = getattr(holder, name, None)
        # Google's `code` is an IntEnum; a bool or a small number is no status.
        if isinstance(status, int) and 100 <= status < 600:
            return int(status)
    return STATUS_OF_WORD.get(str(getattr(error, "error_code", None)))


def _kind_of_status(status: int) -> Failure:
    if status in DENIED:
        return Failure.DENIED
    return Failure.MISSING if status in MISSING else Failure.PASSING


def _kind_of_type(error: BaseException, place: str) -> Failure | None:
    if isinstance(error, ImportError | NoClientError):
        return Failure.BROKEN
    if not NO_CREDENTIALS.isdisjoint(each.__name__ for each in type(error).__mro__):
        return Failure.NO_CREDENTIALS
    if not isinstance(error, OSError):
        return None
    if error.errno in FULL_DISK:
        return Failure.DISK
    if str(error.filename or "").startswith(place):
        # Somebody deletes the folder while it is written to: the next attempt makes it anew.
        return Failure.PASSING if isinstance(error, FileNotFoundError) else Failure.DISK
    if isinstance(error, PermissionError):
        return Failure.DENIED
    return Failure.MISSING if isinstance(error, FileNotFoundError) else None
