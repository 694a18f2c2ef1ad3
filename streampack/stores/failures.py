"""Classification of failures of stores: whether to retry, and what would fix them.

::

    error --its causes--> HTTP status, type of error --> permanent | denied | disk | transient
                          name of its class          --> no credentials

Each store raises its own exceptions, usually wrapped in others, so the whole chain is examined.
A failure that is not known to be permanent is treated as transient.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import Enum

DENIED = (401, 403)
MISSING = (404, 410)
CHANGED = (412, 416)  # If-Match failed; the range is beyond the end
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

# Error codes mapped to a status, for stores with exceptions that carry no number.
STATUS_OF_WORD = {
    "AccessDenied": 403,
    "NOT_FOUND": 404,
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "PERMISSION_DENIED": 403,
}
# Exceptions raised before any request because credentials are missing: by botocore, google-auth,
# oci and azure-core. Matched by name, because the other libraries need not be installed.
NO_CREDENTIALS = {
    "ClientAuthenticationError",
    "ConfigFileNotFound",
    "DefaultCredentialsError",
    "InvalidConfig",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
}
# Hugging Face's exception for an unreachable hub; a subclass of FileNotFoundError.
UNREACHABLE = "LocalEntryNotFoundError"

# botocore's exception for a name that no bucket or object can have.
INVALID_NAME = "ParamValidationError"


class DamagedError(Exception):
    """Bytes that arrived completely according to the store, but are wrong."""


class ChangedError(Exception):
    """An object that is not the version that was asked for."""


class NoStoreError(Exception):
    """A URL that no driver serves."""


class NoRangesError(Exception):
    """A server that sends whole objects only."""


class FailureKind(Enum):
    """Kinds of failure, by their remedy."""

    MISSING = "missing"  # the store has no such object
    DENIED = "denied"  # the store refuses; a client with newer credentials may be accepted
    NO_CREDENTIALS = "no credentials"  # no request was sent, as this process has none
    DISK = "disk"  # the local disk is full or not writable
    BROKEN = "broken"  # this installation has no client for the store, or it cannot do this
    CHANGED = "changed"  # the object is another version than the one that was asked for
    TRANSIENT = "transient"  # any other failure; a retry may succeed
    UNKNOWN = "unknown"  # a built-in one such as KeyError, from a class with its own download


WAYS_OUT = {
    FailureKind.MISSING: "the store has no such object: check the path",
    FailureKind.DENIED: (
        "the store refuses: check the path and the rights of this process's credentials; a store "
        "that denies listing also refuses objects that do not exist"
    ),
    FailureKind.NO_CREDENTIALS: (
        "give this process credentials for the store, in the environment, a file or a role "
        "of the machine, as the store's own tools read them"
    ),
    FailureKind.CHANGED: "rerun it when no process writes to it",
}


def classify(error: BaseException, target: str) -> FailureKind:
    """Classify the failure of a download to paths with the prefix `target`."""
    chain = list(causes_of(error))
    if any(isinstance(cause, ChangedError) for cause in chain):
        return FailureKind.CHANGED
    status = status_of(error)
    if status in DENIED:
        return FailureKind.DENIED
    if status is not None:
        return FailureKind.MISSING if status in MISSING else FailureKind.TRANSIENT
    for cause in chain:
        if type(cause).__name__ == UNREACHABLE:
            return FailureKind.TRANSIENT
        kind = _kind_of_type(cause, target)
        if kind is not None:
            return kind
    is_builtin = all(type(cause).__module__ == "builtins" for cause in chain)
    is_network = any(isinstance(cause, OSError | EOFError) for cause in chain)
    return FailureKind.UNKNOWN if is_builtin and not is_network else FailureKind.TRANSIENT


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error or one of its causes carries, if any."""
    statuses = map(_status_of, causes_of(error))
    return next((status for status in statuses if status is not None), None)


def error_text(error: BaseException) -> str:
    """Return an error's text; for an S3 error the code and the message of the store."""
    status, name, message = status_of(error), type(error).__name__, str(error)
    for cause in causes_of(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error"):
            # Some of botocore's classes are named by the code, others are not.
            name, fields = "ClientError", response["Error"]
            message = f"{fields.get('Code')}, {fields.get('Message')}"
            break
    text = f"{name}: {message}"
    return text if status is None else f"HTTP {status}, {text}"


def codes_of(error: BaseException) -> set[str]:
    """Return the code and the HTTP status of an answer of S3; empty if there was none."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return set()
    code = response.get("Error", {}).get("Code")
    return {str(each) for each in (code, _status_of(error)) if each}


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error of botocore, requests, azure, google or oci."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        word = str((response.get("Error") or {}).get("Code"))
        return status if isinstance(status, int) else STATUS_OF_WORD.get(word)
    names = ("status_code", "status", "code")
    for holder, name in ((response, "status_code"), *((error, name) for name in names)):
        status = getattr(holder, name, None)
        # Google's `code` is an IntEnum; a bool or a small number is not a status.
        if isinstance(status, int) and 100 <= status < 600:
            return int(status)
    return STATUS_OF_WORD.get(str(getattr(error, "error_code", None)))


def _kind_of_type(error: BaseException, target: str) -> FailureKind | None:
    if isinstance(error, ImportError | NoStoreError | NoRangesError):
        return FailureKind.BROKEN
    if not NO_CREDENTIALS.isdisjoint(base.__name__ for base in type(error).__mro__):
        return FailureKind.NO_CREDENTIALS
    if type(error).__name__ == INVALID_NAME:
        return FailureKind.MISSING
    if not isinstance(error, OSError):
        return None
    if error.errno in FULL_DISK:
        return FailureKind.DISK
    if str(error.filename or "").startswith(target):
        # If another process deletes the folder during the write, the next attempt makes it again.
        return FailureKind.TRANSIENT if isinstance(error, FileNotFoundError) else FailureKind.DISK
    if isinstance(error, PermissionError):
        return FailureKind.DENIED
    return FailureKind.MISSING if isinstance(error, FileNotFoundError) else None
