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

import copy
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay

from streampack.errors import DataError, StreampackError, naming_limits
from streampack.storage.client_pool import ask_for_credentials, library_of, process_clients
from streampack.storage.download_errors import (
    DamagedError,
    FailureKind,
    NoClientError,
    classify,
    is_library_missing,
    text_of,
)
from streampack.storage.location import StreamLocation
from streampack.storage.store_checksums import sum_problem

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
        "that may not be listed says so of missing objects, too"
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
OTHER_SUM = {"DataCorruption", "FlexibleChecksumError"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Statistics of one download."""

    attempts: int
    """Number of attempts."""
    elapsed_s: float
    """Time from the first attempt to the end."""


def attempt_s(files: StreamLocation, num_bytes: int | None = None) -> float:
    """Return the time limit of one attempt.

    Args:
        files: Location with the `download_timeout` to use.
        num_bytes: Size of the object, if known.
    """
    return float(files.stream.download_timeout) + (num_bytes or 0) / SLOWEST_BYTES_PER_S


def budget_s(files: StreamLocation, num_bytes: int | None = None) -> float:
    """Return the time limit of all attempts at an object: D * (download_retry + 1)."""
    num_attempts = max(0, int(files.stream.download_retry)) + 1
    return num_attempts * attempt_s(files, num_bytes)


def fetch(
    files: StreamLocation,
    basename: str,
    to: Path,
    *,
    num_bytes: int | None = None,
    check: Callable[[Path], None] | None = None,
    is_hashed: bool = False,
) -> Fetched:
    """Download one object, retrying until it succeeds or its time budget is spent.

    Args:
        files: Location of the stream's files.
        basename: The object's path under the remote folder.
        to: A temporary path below `files.folder`; names with this prefix are used too.
        num_bytes: The object's size, if known; larger objects get more time.
        check: Called with the path of the downloaded file; raises DamagedError if its bytes are
            wrong. The file is then discarded and fetched again, up to 3 times.
        is_hashed: Whether `check` compares a hash. If not, the checksum that the store reports
            for the object is compared, where there is one.

    Raises:
        DataError: If the object cannot be fetched, or only damaged.
        OSError: If it cannot be written here.
    """
    return _fetch(_Job(files, basename, to, num_bytes, is_hashed=is_hashed), check)


def _fetch(job: _Job, check: Callable[[Path], None] | None) -> Fetched:
    try:
        job.run(check)
    except StreampackError:  # from `check`, or from a stream that overrides the download
        raise
    except DamagedError as error:
        again = f"the same in {job.num_damaged} downloads"
        if len(job.problems) > 1:
            again = f"different in {len(job.problems)} of {job.num_damaged} downloads"
        raise job.error(
            f"{error}; {again}, {job.elapsed_s:.1f} s: write the stream anew, "
            f"or, if it was replaced since it was first read, delete {job.folder}"
        ) from error
    except Exception as error:  # each store raises its own exceptions
        kind = job.kind_of(error)
        if kind is FailureKind.DISK and isinstance(error, OSError):
            raise
        way_out = WAYS_OUT.get(kind, "check the path and the access to it")
        if is_library_missing(error):
            way_out = f"install what speaks to such a store: {library_of(job.remote)}"
        times = "attempt" if job.attempts == 1 else "attempts"
        raise job.error(
            f"cannot be fetched, {job.attempts} {times} in {job.elapsed_s:.1f} s "
            f"({'; '.join(job.causes.values())}); {way_out}"
        ) from error
    return Fetched(attempts=job.attempts, elapsed_s=job.elapsed_s)


def fetch_if_there(files: StreamLocation, basename: str, to: Path) -> bool:
    """Download the length file, which is optional; return whether it exists.

    A store that denies listing reports "denied" for objects that do not exist. A class with its own
    download may report this with any built-in exception. Both are logged, as they may mean more.

    Raises:
        DataError: If the store neither returns it nor reports that it does not exist.
        OSError: If it cannot be written here.
    """
    job = _Job(files, basename, to, None, retried=(FailureKind.PASSING,))
    try:
        _fetch(job, None)
    except DataError as error:
        cause = error.__cause__ or error
        kind = job.kind_of(cause)
        if kind in (FailureKind.DENIED, FailureKind.UNKNOWN):
            logger.warning(
                "%s/%s: was refused (%s) and is taken for none: a node that gets it plans "
                "another sequence; give all nodes the same access to it, or, if there is none, "
                "write it (streampack index)",
                files.remote,
                basename,
                text_of(cause),
            )
        elif kind is not FailureKind.MISSING:
            raise
        return False
    return True


class _Job:
    """All attempts at one object."""

    def __init__(
        self,
        files: StreamLocation,
        basename: str,
        to: Path,
        num_bytes: int | None,
        *,
        is_hashed: bool = False,
        retried: tuple[FailureKind, ...] = (FailureKind.PASSING, FailureKind.UNKNOWN),
    ) -> None:
        self._is_hashed = is_hashed
        self._files = files
        self._basename = basename
        self._to = to
        self._attempt_s = attempt_s(files, num_bytes)
        self._budget_s = budget_s(files, num_bytes)
        self._retried = retried
        self._begin = time.monotonic()
        self._needs_new_client = False
        self._was_client_used = False
        self.attempts = 0
        self.num_damaged = 0
        self.problems: set[str] = set()
        self.causes: dict[str, str] = {}
        self._num_without_credentials = 0

    @property
    def folder(self) -> Path:
        return self._files.folder

    @property
    def remote(self) -> str:
        return str(self._files.remote)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def kind_of(self, error: BaseException) -> FailureKind:
        return classify(error, str(self._to))

    def error(self, text: str) -> DataError:
        uri = f"{self._files.remote}/{self._basename}"
        return DataError(
            f"{uri}: {text}",
            uri=uri,
            shard=self._basename,
            attempts=self.attempts,
            elapsed_s=self.elapsed_s,
        )

    def run(self, check: Callable[[Path], None] | None) -> None:
        retrying = Retrying(
            stop=stop_before_delay(self._budget_s),
            wait=self._wait_s,
            retry=retry_if_exception(self._is_worth_another),
            before_sleep=self._tell,
            reraise=True,
        )
        retrying(self._attempt, check)

    def _attempt(self, check: Callable[[Path], None] | None) -> None:
        self.attempts += 1
        place = Path(f"{self._to}.{self.attempts}")
        place.mkdir(parents=True, exist_ok=True)
        try:
            download = _Download(self._files, self._basename, place, self._needs_new_client)
            try:
                path = download.run(min(self._attempt_s, self._budget_s - self.elapsed_s))
            finally:
                self._was_client_used = download.is_client_used
            problem = None if self._is_hashed else sum_problem(path, download.sums)
            if problem is not None:
                raise DamagedError(problem)
            if check is not None:
                check(path)
            path.replace(self._to)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _is_worth_another(self, error: BaseException) -> bool:
        if isinstance(error, DamagedError):
            self.num_damaged += 1
            self.problems.add(str(error))
            return self.num_damaged <= MAX_DAMAGED
        if isinstance(error, StreampackError) or not isinstance(error, Exception):
            return False
        # Keep the last failure of each kind: a final time-out must not hide the earlier ones.
        text = text_of(error)
        self.causes[text.partition(":")[0]] = text
        kind = self.kind_of(error)
        if kind is FailureKind.DENIED and self._was_client_used:
            # The client's credentials may have expired; a new client reads them again.
            self._needs_new_client = True
            return True
        if kind is FailureKind.NO_CREDENTIALS:
            self._num_without_credentials += 1
            return self._num_without_credentials < MAX_WITHOUT_CREDENTIALS
        return kind in self._retried

    def _wait_s(self, state: RetryCallState) -> float:
        longest = min(
            FIRST_WAIT_S * 2 ** min(state.attempt_number - 1, 30),
            self._budget_s / WAITS_PER_BUDGET,
        )
        # Not the shared `random`: waits must differ between ranks with equal seeds, and a failure
        # must not advance the user's random state.
        return random.SystemRandom().uniform(0, longest)

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        # A long outage fails often on many ranks: warn of the 1st, 2nd, 4th, 8th ... failure only.
        is_told = self.attempts & (self.attempts - 1) == 0
        logger.log(
            logging.WARNING if is_told else logging.DEBUG,
            "%s/%s: attempt %d failed after %.1f s (%s); trying again",
            self._files.remote,
            self._basename,
            self.attempts,
            self.elapsed_s,
            "" if error is None else text_of(error),
        )


class _Download:
    """One attempt in its own thread, which is abandoned once it is overdue."""

    def __init__(
        self, files: StreamLocation, basename: str, place: Path, needs_new_client: bool
    ) -> None:
        self._files = files
        self._basename = basename
        self._place = place
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
        path = self._path
        if not path.is_file():
            raise ConnectionError(f"the store's client reported success, but wrote no {path.name}")
        return path

    @property
    def _path(self) -> Path:
        return self._place / os.path.basename(self._basename)

    def _work(self) -> None:
        try:
            self._download()
        except BaseException as error:  # re-raised in the waiting thread
            self._error = error
        with self._lock:
            self._ended.set()
            is_abandoned = self._is_abandoned
        if is_abandoned:
            shutil.rmtree(self._place, ignore_errors=True)

    def _download(self) -> None:
        stream: Any = copy.copy(self._files.stream)
        remote, timeout_s = stream.remote, float(stream.download_timeout)
        clients = process_clients()
        try:
            client, self.is_client_used = clients.take(
                remote, timeout_s, is_new=self._needs_new_client
            )
        except Exception as error:  # store libraries raise anything here
            raise NoClientError(f"{remote}: {type(error).__name__}: {error}") from error
        if not self.is_client_used:
            ask_for_credentials(client)
        client.answers.sums = {}
        with self._lock:
            self._client = None if self._is_abandoned else client
        if self._is_abandoned:
            return
        stream._downloader = client
        stream.download_retry = 1  # retries happen in this module
        try:
            stream._download_file(self._basename, os.path.relpath(self._path, self._files.folder))
        except BaseException as error:
            clients.drop(client)
            if type(error).__name__ in OTHER_SUM:
                raise DamagedError(" ".join(str(error).split())) from error
            raise
        self.sums = client.answers.sums  # another thread may take the client next
        with self._lock:  # from here on it can no longer be cut
            self._client = None
        if self._is_abandoned:
            clients.drop(client)
        else:
            clients.give_back(remote, timeout_s, client)
