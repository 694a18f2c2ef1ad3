"""Attempts at a store: each in a thread with a deadline, repeated within a time budget.

With attempts of D seconds and a budget of 3 D::

    attempt 1   |--- D ---x                                            overdue: abandoned
    attempt 2             |-x |-x  |--x     |-x                        quick failures, back-off
    attempt n                                    |------>
                |------------------ budget = 3 D ------------------|   then: DataError

Cost: a thread for each attempt, about 0.1 ms.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from streampack.errors import DataError, StreampackError
from streampack.stores.drivers import PACKAGES
from streampack.stores.failures import (
    WAYS_OUT,
    DamagedError,
    FailureKind,
    NoRangesError,
    causes_of,
    classify,
    codes_of,
    error_text,
    status_of,
)
from streampack.stores.objects import StoredObject
from streampack.stores.s3 import REQUESTER_PAYS, S3_SCHEMES
from streampack.stores.store import TIMEOUT_S, Store, open_store, renew_store
from streampack.stores.threads import within_time

FIRST_WAIT_S = 0.1
WAITS_PER_BUDGET = 20
MAX_DAMAGED = 3
# A machine's own credentials also come from a network service, which may miss a call.
MAX_WITHOUT_CREDENTIALS = 3
SLOWEST_BYTES_PER_S = 1_000_000
ATTEMPT_S, BUDGET_S = 120.0, 300.0
"""Limits of a request of at most some MB."""
LISTING_S = 600.0
RETRIED = (FailureKind.TRANSIENT, FailureKind.UNKNOWN)
REFUSED = (FailureKind.DENIED, FailureKind.NO_CREDENTIALS)
WHO_PAYS = f". If readers pay for the bucket, name it in {REQUESTER_PAYS}"

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Retries:
    """All attempts at one object.

    Args:
        url: The object, for messages.
        attempt_s: Time limit of one attempt.
        budget_s: Time limit of all attempts.
        timeout_s: How long the store's answer may take.
        retried: Failures that may pass.
        target: Prefix of the paths that attempts write to.
    """

    def __init__(
        self,
        url: str,
        *,
        attempt_s: float,
        budget_s: float,
        timeout_s: float = TIMEOUT_S,
        retried: tuple[FailureKind, ...] = RETRIED,
        target: str = "\0",
    ) -> None:
        self._url = url
        self._attempt_s, self._budget_s, self._timeout_s = attempt_s, budget_s, timeout_s
        self._retried = retried
        self._target = target
        self._begin = time.monotonic()
        self._store: Store | None = None  # the latest attempt's
        self._num_refused = 0
        self._causes: dict[str, str] = {}
        self.num_attempts = 0
        self.damages: list[str] = []

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def run(self, attempt: Callable[[float], _T]) -> _T:
        """Call `attempt` with its time limit until it succeeds; raise its last exception."""
        while True:
            self.num_attempts += 1
            try:
                return attempt(min(self._attempt_s, self._budget_s - self.elapsed_s))
            except Exception as error:  # each store raises its own exceptions
                wait_s = self._wait_s()
                is_over = self.elapsed_s + wait_s >= self._budget_s
                if not self._is_worth_another(error) or is_over:
                    raise
                self._log(error)
            time.sleep(wait_s)

    def use_store(self, operation: Callable[[Store], _T]) -> _T:
        store = open_store(self._url, self._timeout_s)
        self._store = store
        result = operation(store)
        store.has_served = True
        return result

    def error(self, error: Exception, action: str, way_out: str = "", **facts: Any) -> DataError:
        """Return the DataError of an object that cannot be fetched, say, with a way out."""
        kind = classify(error, self._target)
        if kind is FailureKind.DENIED and self._store and not self._store.has_credentials:
            kind = FailureKind.NO_CREDENTIALS
        way_out = self._way_out(error, kind) or way_out
        attempts = f"{self.num_attempts} attempt{'s' if self.num_attempts > 1 else ''}"
        causes = "; ".join(self._causes.values()) or error_text(error)
        return DataError(
            f"{self._url}: cannot be {action}, {attempts} in {self.elapsed_s:.1f} s ({causes}); "
            f"{way_out}",
            uri=self._url,
            attempts=self.num_attempts,
            elapsed_s=self.elapsed_s,
            **facts,
        )

    def _way_out(self, error: Exception, kind: FailureKind) -> str:
        if "NoSuchBucket" in codes_of(error):
            return "the store has no such bucket: check its name, and S3_ENDPOINT_URL"
        scheme = self._url.partition(":")[0]
        if kind is not FailureKind.BROKEN:
            is_paid = scheme in S3_SCHEMES and kind in REFUSED
            return WAYS_OUT.get(kind, "") + WHO_PAYS * is_paid
        causes = list(causes_of(error))
        if any(isinstance(cause, ImportError) for cause in causes):
            package = f": pip install {PACKAGES[scheme]}" if scheme in PACKAGES else ""
            return f"install the driver of this store{package}"
        if any(isinstance(cause, NoRangesError) for cause in causes):
            return "copy the file to this machine, or to a server that sends ranges"
        return f"nothing reads {scheme}: URLs; install an fsspec driver for it, or copy the files"

    def _is_worth_another(self, error: Exception) -> bool:
        if isinstance(error, DamagedError):
            self.damages.append(str(error))
            return len(self.damages) <= MAX_DAMAGED
        if isinstance(error, StreampackError):
            return False
        # Keep the last failure of each kind: a final time-out must not hide the earlier ones.
        text = error_text(error)
        self._causes[text.partition(":")[0]] = text
        kind = classify(error, self._target)
        if kind in REFUSED:
            most, store = MAX_WITHOUT_CREDENTIALS, self._store
            if kind is FailureKind.DENIED and (store is None or store.has_credentials):
                most = 1 + bool(store and store.has_served)
            self._renew()
            self._num_refused += 1
            return self._num_refused < most
        if status_of(error) == 400:  # such as ExpiredToken
            self._renew()
        return kind in self._retried

    def _renew(self) -> None:
        if self._store is not None:
            renew_store(self._url, self._timeout_s, self._store)

    def _wait_s(self) -> float:
        back_off_s = FIRST_WAIT_S * 2 ** min(self.num_attempts - 1, 30)
        longest = min(back_off_s, self._budget_s / WAITS_PER_BUDGET)
        # Not the shared `random`: waits must differ between ranks with equal seeds, and a failure
        # must not advance the user's random state.
        return random.SystemRandom().uniform(0, longest)

    def _log(self, error: Exception) -> None:
        # A long outage fails often on many ranks: warn of the 1st, 2nd, 4th, 8th ... failure only.
        is_warning = self.num_attempts & (self.num_attempts - 1) == 0
        logger.log(
            logging.WARNING if is_warning else logging.DEBUG,
            "%s: attempt %d failed after %.1f s (%s); trying again",
            self._url,
            self.num_attempts,
            self.elapsed_s,
            error_text(error),
        )


def request(
    url: str,
    action: str,
    operation: Callable[[Store], _T],
    *,
    way_out: str = "",
    attempt_s: float = ATTEMPT_S,
    num_bytes: int = 0,
) -> _T:
    """Return the result of an operation on a store, which is retried for five minutes.

    Args:
        url: The object.
        action: What the operation does, for the error: "cannot be read".
        operation: One attempt.
        way_out: What to do about failures that have no way out of their own.
        attempt_s: Time limit of one attempt.
        num_bytes: Bytes that it transfers, if they are many; they raise the limit.

    Raises:
        DataError: If it fails; its `__cause__` is the library's exception.
    """
    attempt_s += num_bytes / SLOWEST_BYTES_PER_S
    retries = Retries(url, attempt_s=attempt_s, budget_s=max(BUDGET_S, attempt_s))
    attempt = partial(within_time, partial(retries.use_store, operation))
    try:
        return retries.run(attempt)
    except StreampackError:
        raise
    except Exception as error:  # each store raises its own exceptions
        raise retries.error(error, action, way_out) from error


def list_objects(prefix: str, *, way_out: str = "") -> Iterator[StoredObject]:
    """Yield the objects with a URL that begins with `prefix`; each page is retried.

    Raises:
        DataError: If the store cannot be listed.
    """
    after: str | None = ""
    while after is not None:
        page = methodcaller("list", prefix, after)
        found, after = request(prefix, "listed", page, way_out=way_out, attempt_s=LISTING_S)
        yield from found


def kind_of(error: DataError) -> FailureKind:
    """Return the kind of failure that a DataError of this module describes."""
    return classify(error.__cause__ or error, "\0")
