"""Errors as raised by the libraries of stores, and what kind of failure each of them is."""

from __future__ import annotations

import errno
from email.message import Message
from types import SimpleNamespace
from urllib.error import HTTPError

import google.api_core.exceptions as google
import pytest
import requests
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
    ServiceRequestError,
)
from azure.identity import CredentialUnavailableError
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ProfileNotFound,
)
from google.auth.exceptions import DefaultCredentialsError, TransportError
from huggingface_hub.errors import LocalEntryNotFoundError
from oci.exceptions import ConfigFileNotFound, ServiceError

from streampack.stores.failures import FailureKind, NoStoreError, classify

PLACE = "/local/.streampack/xyz.tmp"


def s3_error(status: int, code: str) -> ClientError:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "HeadObject")


def requests_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("refused", response=response)


def azure_error(status: int) -> HttpResponseError:
    response = SimpleNamespace(status_code=status, reason="refused")
    return HttpResponseError(message="refused", response=response)


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (s3_error(404, "NoSuchKey"), FailureKind.MISSING),
        (s3_error(403, "403"), FailureKind.DENIED),
        (s3_error(400, "ExpiredToken"), FailureKind.TRANSIENT),
        (s3_error(503, "SlowDown"), FailureKind.TRANSIENT),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject"), FailureKind.DENIED),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), FailureKind.TRANSIENT),
        (NoCredentialsError(), FailureKind.NO_CREDENTIALS),
        (ProfileNotFound(profile="x"), FailureKind.NO_CREDENTIALS),
        (requests_error(404), FailureKind.MISSING),
        (requests_error(502), FailureKind.TRANSIENT),
        (azure_error(403), FailureKind.DENIED),
        (azure_error(500), FailureKind.TRANSIENT),
        (ClientAuthenticationError("no token"), FailureKind.NO_CREDENTIALS),
        (CredentialUnavailableError("no account"), FailureKind.NO_CREDENTIALS),
        (because(ResourceNotFoundError("none"), azure_error(404)), FailureKind.MISSING),
        (ServiceRequestError("no route"), FailureKind.TRANSIENT),
        (google.NotFound("none"), FailureKind.MISSING),
        (google.TooManyRequests("slowly"), FailureKind.TRANSIENT),
        (
            because(ValueError("GCS_KEY"), DefaultCredentialsError("none")),
            FailureKind.NO_CREDENTIALS,
        ),
        (TransportError("no route"), FailureKind.TRANSIENT),
        (ServiceError(404, "ObjectNotFound", {}, "none"), FailureKind.MISSING),
        (ConfigFileNotFound("no ~/.oci/config"), FailureKind.NO_CREDENTIALS),
        (HTTPError("http://x", 410, "gone", Message(), None), FailureKind.MISSING),
        (LocalEntryNotFoundError("the hub cannot be reached"), FailureKind.TRANSIENT),
        (because(FileNotFoundError("none"), s3_error(403, "403")), FailureKind.DENIED),
        (because(RuntimeError("wrapped"), FileNotFoundError("none")), FailureKind.MISSING),
        (PermissionError(errno.EACCES, "no"), FailureKind.DENIED),
        (OSError(errno.EIO, "the network's file system"), FailureKind.TRANSIENT),
        (TimeoutError("slow"), FailureKind.TRANSIENT),
        (ImportError("no such library"), FailureKind.BROKEN),
        (NoStoreError("no such store"), FailureKind.BROKEN),
        (OSError(errno.ENOSPC, "full"), FailureKind.DISK),
        (because(RuntimeError("wrapped"), OSError(errno.EDQUOT, "quota")), FailureKind.DISK),
        (PermissionError(errno.EACCES, "no", f"{PLACE}.1/a"), FailureKind.DISK),
        # Its folder was deleted during the write; the next attempt recreates it.
        (FileNotFoundError(errno.ENOENT, "none", f"{PLACE}.1/a"), FailureKind.TRANSIENT),
        (FileNotFoundError(errno.ENOENT, "none", "/remote/a"), FailureKind.MISSING),
    ],
)
def test_an_error_is_known_by_its_status_or_its_kind(error, kind):
    assert classify(error, PLACE) is kind


def test_what_a_store_hides_on_purpose_is_not_looked_at():
    error = because(RuntimeError("a"), RuntimeError("b"))
    error.__context__ = FileNotFoundError("an unrelated file")
    assert classify(error, PLACE) is FailureKind.UNKNOWN
