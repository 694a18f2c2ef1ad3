"""Download of one object with retries, within a time budget.

With download_timeout=60 and download_retry=2, and D = 60 s + num_bytes / 1 MB/s::

    attempt 1   |--- D ---x                                            overdue: abandoned
    attempt 2             |-x |-x  |--x     |-x                        quick failures, back-off
    attempt n                                    |------> check --> rename to its temporary name
                |------------------ budget = 3 D ------------------|   then: DataError

Each attempt has its own thread, client and folder. An overdue attempt is abandoned: its connection
is cut and its folder is removed. Its thread removes the folder again when it ends. If no hash can
verify the bytes, the store's own checksum is compared (store_checksums.py).

Cost: a thread for each attempt, about 0.1 ms; a store's client is created once and reused.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay

from streampack.errors import DataError, StreampackError, naming_limits
from streampack.mds.regular_files import check_file
from streampack.storage.client_pool import ask_for_credentials, library_of, process_clients
from streampack.storage.location import StreamLocation
from streampack.storage.store_checksums import checksum_problem
from streampack.stores.failures import (
    DamagedError,
    FailureKind,
    NoStoreError,
    classify,
    is_library_missing,
    text_of,
)

SLOWEST_BYTES_PER_S = 1_000_000
FIRST_WAIT_S = 0.1
WAITS_PER_BUDGET = 20
MAX_DAMAGED = 3
# A machine's own credentials also come from a network service, which may miss a call.
MAX_WITHOUT_CREDENTIALS = 3

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
    **dict.fromkeys(
        (FailureKind.PASSING, FailureKind.UNKNOWN),
        "check the path and the access to it, or raise download_retry= and download_timeout=",
    ),
}
# Exceptions that boto3 and Google's client raise after their own checksum comparison.
CLIENT_CHECKSUM_ERRORS = {"DataCorruption", "FlexibleChecksumError"}

logger = logging.getLogger(__name__)


def attempt_s(location: StreamLocation, num_bytes: int | None = None) -> float:
    """Return the time limit of one attempt at an object, whose size may be unknown."""
    return float(location.stream.download_timeout) + (num_bytes or 0) / SLOWEST_BYTES_PER_S


def budget_s(location: StreamLocation, num_bytes: int | None = None) -> float:
    """Return the time limit of all attempts at an object: D * (download_retry + 1)."""
    num_attempts = max(0, int(location.stream.download_retry)) + 1
    return num_attempts * attempt_s(location, num_bytes)


def fetch(
    location: StreamLocation,
    basename: str,
    to: Path,
    *,
    num_bytes: int | None = None,
    check: Callable[[Path], None] | None = None,
    is_hashed: bool = False,
) -> int:
    """Download one object, retrying within its time budget; return the number of attempts.

    `to` is a temporary path below the local folder; names with this prefix are used too. Larger
    objects get more time. `check` raises DamagedError for a file with wrong bytes, which is then
    discarded and fetched again, up to 3 times. Unless `check` compares a hash (`is_hashed`), the
    checksum that the store reports is compared, where there is one. A DataError says that the
    object cannot be fetched, or only damaged; an OSError, that it cannot be written here.
    """
    return _Download(location, basename, to, num_bytes, is_hashed=is_hashed).run(check)


def fetch_if_there(location: StreamLocation, basename: str, to: Path) -> bool:
    """Download the length file, which is optional; return whether it exists.

    A store that denies listing reports "denied" for objects that do not exist. A class with its own
    download may report this with any built-in exception. Both are logged, as they may mean more.
    """
    download = _Download(location, basename, to, None, retried=(FailureKind.PASSING,))
    try:
        download.run(None)
    except DataError as error:
        cause = error.__cause__ or error
        kind = classify(cause, str(to))
        if kind in (FailureKind.DENIED, FailureKind.UNKNOWN):
            logger.warning(
                "%s: was refused (%s) and is treated as missing: a node that gets it plans "
                "another sequence; give all nodes the same access to it, or, if there is none, "
                "write it (streampack index)",
                download.uri,
                text_of(cause),
            )
        elif kind is not FailureKind.MISSING:
            raise
        return False
    return True


class _Download:
    """All attempts at one object."""

    def __init__(
        self,
        location: StreamLocation,
        basename: str,
        to: Path,
        num_bytes: int | None,
        *,
        is_hashed: bool = False,
        retried: tuple[FailureKind, ...] = (FailureKind.PASSING, FailureKind.UNKNOWN),
    ) -> None:
        self.uri = f"{location.remote}/{basename}"
        self._location = location
        self._basename = basename
        self._to = to
        self._is_hashed = is_hashed
        self._attempt_s = attempt_s(location, num_bytes)
        self._budget_s = budget_s(location, num_bytes)
        self._retried = retried
        self._begin = time.monotonic()
        self._needs_new_client = False
        self._last: _Attempt  # the latest one
        self._num_attempts = 0
        self._num_without_credentials = 0
        self._damages: list[str] = []
        self._causes: dict[str, str] = {}

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def run(self, check: Callable[[Path], None] | None) -> int:
        """Attempt the download until it succeeds; return and raise as `fetch`."""
        if (folder := self._location.remote_folder) is not None:
            with suppress(OSError):  # the attempts tell
                check_file(folder / self._basename)
        retrying = Retrying(
            stop=stop_before_delay(self._budget_s),
            wait=self._wait_s,
            retry=retry_if_exception(self._is_worth_another),
            before_sleep=self._log_failure,
            reraise=True,
        )
        try:
            retrying(self._attempt, check)
        except StreampackError:  # from `check`, or from a stream that overrides the download
            raise
        except DamagedError as error:
            times = f"the same in {len(self._damages)} downloads"
            if (num_different := len(set(self._damages))) > 1:
                times = f"different in {num_different} of {len(self._damages)} downloads"
            raise self._error(
                f"{error}; {times}, {self._elapsed_s:.1f} s: write the stream again, or, if it was "
                f"replaced since it was first read, delete {self._location.folder}"
            ) from error
        except Exception as error:  # each store raises its own exceptions
            kind = classify(error, str(self._to))
            if kind is FailureKind.DISK and isinstance(error, OSError):
                raise
            way_out = WAYS_OUT.get(kind, "check the path and the access to it")
            if is_library_missing(error):
                library = library_of(str(self._location.remote))
                way_out = f"install the client library of this store: {library}"
            attempts = f"{self._num_attempts} attempt{'s' if self._num_attempts > 1 else ''}"
            raise self._error(
                f"cannot be fetched, {attempts} in {self._elapsed_s:.1f} s "
                f"({'; '.join(self._causes.values())}); {way_out}"
            ) from error
        return self._num_attempts

    def _error(self, text: str) -> DataError:
        return DataError(
            f"{self.uri}: {text}",
            uri=self.uri,
            shard=self._basename,
            attempts=self._num_attempts,
            elapsed_s=self._elapsed_s,
        )

    def _attempt(self, check: Callable[[Path], None] | None) -> None:
        self._num_attempts += 1
        folder = Path(f"{self._to}.{self._num_attempts}")
        attempt = _Attempt(self._location, self._basename, folder, self._needs_new_client)
        self._last = attempt
        folder.mkdir(parents=True, exist_ok=True)
        try:
            path = attempt.run(min(self._attempt_s, self._budget_s - self._elapsed_s))
            problem = None if self._is_hashed else checksum_problem(path, attempt.sums)
            if problem is not None:
                raise DamagedError(problem)
            if check is not None:
                check(path)
            path.replace(self._to)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_worth_another(self, error: BaseException) -> bool:
        if isinstance(error, DamagedError):
            self._damages.append(str(error))
            return len(self._damages) <= MAX_DAMAGED
        if isinstance(error, StreampackError) or not isinstance(error, Exception):
            return False
        # Keep the last failure of each kind: a final time-out must not hide the earlier ones.
        text = text_of(error)
        self._causes[text.partition(":")[0]] = text
        kind = classify(error, str(self._to))
        if kind is FailureKind.DENIED and self._last.is_client_used:
            # The client's credentials may have expired; a new client reads them again.
            self._needs_new_client = True
            return True
        if kind is FailureKind.NO_CREDENTIALS:
            self._num_without_credentials += 1
            return self._num_without_credentials < MAX_WITHOUT_CREDENTIALS
        return kind in self._retried

    def _wait_s(self, state: RetryCallState) -> float:
        back_off_s = FIRST_WAIT_S * 2 ** min(state.attempt_number - 1, 30)
        longest = min(back_off_s, self._budget_s / WAITS_PER_BUDGET)
        # Not the shared `random`: waits must differ between ranks with equal seeds, and a failure
        # must not advance the user's random state.
        return random.SystemRandom().uniform(0, longest)

    def _log_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        # A long outage fails often on many ranks: warn of the 1st, 2nd, 4th, 8th ... failure only.
        is_warning = self._num_attempts & (self._num_attempts - 1) == 0
        logger.log(
            logging.WARNING if is_warning else logging.DEBUG,
            "%s: attempt %d failed after %.1f s (%s); trying again",
            self.uri,
            self._num_attempts,
            self._elapsed_s,
            "" if error is None else text_of(error),
        )


class _Attempt:
    """One attempt in its own thread, which is abandoned once it is overdue."""

    def __init__(
        self, location: StreamLocation, basename: str, folder: Path, needs_new_client: bool
    ) -> None:
        self._location = location
        self._basename = basename
        self._folder = folder
        self._path = folder / os.path.basename(basename)
        self._needs_new_client = needs_new_client
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_abandoned = False
        self._error: BaseException | None = None
        self._client: Any = None  # set while it downloads
        self.sums: dict[str, str] = {}  # checksums that the store reported
        self.is_client_used = False

    def run(self, timeout_s: float) -> Path:
        """Download and return the path; raise the store client's exception, or TimeoutError."""
        thread = threading.Thread(target=self._work, name="streampack-fetch", daemon=True)
        with naming_limits():
            thread.start()
        try:
            self._ended.wait(max(0.0, timeout_s))
        finally:
            with self._lock:
                self._is_abandoned = not self._ended.is_set()
                client = self._client if self._is_abandoned else None
            if client is not None:
                client.answers.cut()
                process_clients().drop(client)
        if self._is_abandoned:
            raise TimeoutError(f"not done within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error
        if not self._path.is_file():
            name = self._path.name
            raise ConnectionError(f"the store's client reported success, but wrote no {name}")
        return self._path

    def _work(self) -> None:
        try:
            self._download()
        except BaseException as error:  # re-raised in the waiting thread
            self._error = error
        with self._lock:
            self._ended.set()
            is_abandoned = self._is_abandoned
        if is_abandoned:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _download(self) -> None:
        if self._location.own_download is not None:
            self._location.own_download(self._basename, self._path)
            return
        remote = self._location.remote
        timeout_s = float(self._location.stream.download_timeout)
        clients = process_clients()
        try:
            client, self.is_client_used = clients.take(
                remote, timeout_s, is_new=self._needs_new_client
            )
        except Exception as error:  # store libraries raise anything here
            raise NoStoreError(f"{remote}: {type(error).__name__}: {error}") from error
        if not self.is_client_used:
            ask_for_credentials(client)
        client.answers.sums = {}
        with self._lock:
            self._client = None if self._is_abandoned else client
        if self._is_abandoned:
            return
        try:
            client.download(f"{remote}/{self._basename}", str(self._path), timeout_s)
        except BaseException as error:
            clients.drop(client)
            if type(error).__name__ in CLIENT_CHECKSUM_ERRORS:
                raise DamagedError(" ".join(str(error).split())) from error
            raise
        self.sums = client.answers.sums  # another thread may take the client next
        with self._lock:  # from here on it can no longer be cut
            self._client = None
        if self._is_abandoned:
            clients.drop(client)
        else:
            clients.give_back(remote, timeout_s, client)
