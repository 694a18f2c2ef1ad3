"""Errors as the stores' own libraries raise them, and what each of them means."""

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
    PartialCredentialsError,
    ProfileNotFound,
)
from google.auth.exceptions import DefaultCredentialsError, TransportError
from huggingface_hub.errors import LocalEntryNotFoundError
from oci.exceptions import ConfigFileNotFound, InvalidConfig, ServiceError

from streampack.streams.failures import Failure, NoClientError, kind_of

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
        (s3_error(404, "NoSuchKey"), Failure.MISSING),
        (s3_error(403, "403"), Failure.DENIED),
        (s3_error(401, "Unauthorized"), Failure.DENIED),
        (s3_error(400, "ExpiredToken"), Failure.PASSING),
        (s3_error(429, "SlowDown"), Failure.PASSING),
        (s3_error(503, "SlowDown"), Failure.PASSING),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject"), Failure.DENIED),
        (ClientError({}, "GetObject"), Failure.PASSING),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), Failure.PASSING),
        (NoCredentialsError(), Failure.NO_CREDENTIALS),
        (PartialCredentialsError(provider="env", cred_var="x"), Failure.NO_CREDENTIALS),
        (ProfileNotFound(profile="x"), Failure.NO_CREDENTIALS),
        (requests_error(404), Failure.MISSING),
        (requests_error(403), Failure.DENIED),
        (requests_error(502), Failure.PASSING),
        (azure_error(403), Failure.DENIED),
        (azure_error(500), Failure.PASSING),
        (azure_error(401), Failure.DENIED),
        (ClientAuthenticationError("no token"), Failure.NO_CREDENTIALS),
        (CredentialUnavailableError("no account"), Failure.NO_CREDENTIALS),
        (because(ResourceNotFoundError("none"), azure_error(404)), Failure.MISSING),
        (ServiceRequestError("no route"), Failure.PASSING),
        (google.NotFound("none"), Failure.MISSING),
        (google.Forbidden("no"), Failure.DENIED),
        (google.TooManyRequests("slowly"), Failure.PASSING),
        (google.ServiceUnavailable("later"), Failure.PASSING),
        (because(ValueError("GCS_KEY"), DefaultCredentialsError("none")), Failure.NO_CREDENTIALS),
        (TransportError("no route"), Failure.PASSING),
        (ServiceError(404, "ObjectNotFound", {}, "none"), Failure.MISSING),
        (ConfigFileNotFound("no ~/.oci/config"), Failure.NO_CREDENTIALS),
        (InvalidConfig({"user": "missing"}), Failure.NO_CREDENTIALS),
        (ServiceError(429, "TooManyRequests", {}, "slowly"), Failure.PASSING),
        (HTTPError("http://x", 410, "gone", Message(), None), Failure.MISSING),
        (LocalEntryNotFoundError("the hub cannot be reached"), Failure.PASSING),
        (because(FileNotFoundError("none"), s3_error(403, "403")), Failure.DENIED),
        (because(RuntimeError("wrapped"), FileNotFoundError("none")), Failure.MISSING),
        (OSError(errno.ENOENT, "No such file"), Failure.MISSING),
        (PermissionError(errno.EACCES, "no"), Failure.DENIED),
        (OSError(errno.EIO, "the network's file system"), Failure.PASSING),
        (TimeoutError("slow"), Failure.PASSING),
        (RuntimeError("whatever"), Failure.UNKNOWN),
        (ImportError("no such library"), Failure.BROKEN),
        (NoClientError("no such store"), Failure.BROKEN),
        (OSError(errno.ENOSPC, "full"), Failure.DISK),
        (because(RuntimeError("wrapped"), OSError(errno.EDQUOT, "quota")), Failure.DISK),
        (PermissionError(errno.EACCES, "no", f"{PLACE}.1/a"), Failure.DISK),
        # Its folder was deleted while it was written to: the next attempt makes it anew.
        (FileNotFoundError(errno.ENOENT, "none", f"{PLACE}.1/a"), Failure.PASSING),
        (FileNotFoundError(errno.ENOENT, "none", "/remote/a"), Failure.MISSING),
    ],
)
def test_an_error_is_known_by_its_status_or_its_kind(error, kind):
    assert kind_of(error, PLACE) is kind


def test_an_error_that_is_its_own_cause_is_looked_at_once():
    error = RuntimeError("a")
    other = because(RuntimeError("b"), error)
    error.__cause__ = other
    assert kind_of(error, PLACE) is Failure.UNKNOWN


def test_what_a_store_hides_on_purpose_is_not_looked_at():
    error = because(RuntimeError("a"), RuntimeError("b"))
    error.__context__ = FileNotFoundError("an unrelated file")
    assert kind_of(error, PLACE) is Failure.UNKNOWN


@pytest.mark.parametrize("error", [KeyError("lengths.bin"), ValueError("no"), RuntimeError("no")])
def test_pythons_own_errors_say_nothing_of_the_network(error):
    assert kind_of(error, PLACE) is Failure.UNKNOWN
    assert kind_of(because(error, ConnectionResetError("reset")), PLACE) is Failure.PASSING
