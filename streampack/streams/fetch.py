"""One object brought here, whatever the network does: its bytes, or an error within its budget.

With download_timeout=60 and download_retry=2, and D = 60 s + num_bytes / 1 MB/s::

    attempt 1   |--- D ---x                                            overdue: left alone
    attempt 2             |-x |-x  |--x     |-x                        quick failures, back-off
    attempt n                                    |------> check --> rename to its temporary name
                |------------------ budget = 3 D ------------------|   then: DataError

Every attempt has a thread, a client and a folder of its own. One that is overdue is not waited for;
its folder is removed at once, and again by its thread when that ends.

Cost: a thread for each attempt, some 0.1 ms; for a store, its client is made once and used again.
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

from streampack.errors import DataError, StreampackError
from streampack.streams.clients import ask_for_credentials, library_of, process_clients
from streampack.streams.failures import DamagedError, Failure, NoClientError, kind_of, status_of
from streampack.streams.files import StreamFiles

__all__ = ["DamagedError", "Fetched", "attempt_s", "budget_s", "fetch", "fetch_if_there"]

SLOWEST_BYTES_PER_S = 1_000_000
FIRST_WAIT_S = 0.1
WAITS_PER_BUDGET = 20
MAX_DAMAGED = 3
# A machine's own credentials come over a network, too, from a service that may miss a call.
MAX_WITHOUT_CREDENTIALS = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What bringing one object took."""

    attempts: int
    """How often it was asked for."""
    elapsed_s: float
    """From the first attempt to the end."""


def attempt_s(files: StreamFiles, num_bytes: int | None = None) -> float:
    """Return how long one attempt may take in all, whatever the store does.

    Args:
        files: Whose `download_timeout` it is.
        num_bytes: Size of the object, if known.
    """
    return float(files.stream.download_timeout) + (num_bytes or 0) / SLOWEST_BYTES_PER_S


def budget_s(files: StreamFiles, num_bytes: int | None = None) -> float:
    """Return how long all attempts at an object may take together: D * (download_retry + 1)."""
    num_attempts = max(0, int(files.stream.download_retry)) + 1
    return num_attempts * attempt_s(files, num_bytes)


def fetch(
    files: StreamFiles,
    basename: str,
    to: Path,
    *,
    num_bytes: int | None = None,
    check: Callable[[Path], None] | None = None,
) -> Fetched:
    """Bring one object here, trying until it is there or its budget is spent.

    Args:
        files: Where the stream's files are.
        basename: The object's path under the remote folder.
        to: A temporary path below `files.folder`; names that begin with it are used too.
        num_bytes: The object's size, if known; larger ones get more time.
        check: Called with the path of what came; raises DamagedError for bytes that are not what
            they should be. They are thrown away and fetched again, up to 3 times.

    Raises:
        DataError: If the store does not give it, or not undamaged.
        OSError: If it cannot be written here.
    """
    return _fetch(_Job(files, basename, to, num_bytes), check)


def _fetch(job: _Job, check: Callable[[Path], None] | None) -> Fetched:
    try:
        job.run(check)
    except StreampackError:  # of `check`, or of a stream that fetches in its own way
        raise
    except DamagedError as error:
        raise job.error(
            f"{error}; damaged {job.num_damaged} times in {job.elapsed_s:.1f} s: write it anew, "
            f"or, if the stream was replaced since it was first read, delete {job.folder}"
        ) from error
    except Exception as error:  # every store has errors of its own
        kind = job.kind_of(error)
        if kind is Failure.DISK and isinstance(error, OSError):
            raise
        way_out = "check the path and the access to it"
        if kind in (Failure.PASSING, Failure.UNKNOWN):
            way_out += ", or raise download_retry= and download_timeout="
        if kind is Failure.NO_CREDENTIALS:
            way_out = (
                "give this process credentials for the store, in the environment, a file or a role "
                "of the machine, as the store's own tools read them"
            )
        if isinstance(error, ImportError):
            way_out = f"install what speaks to such a store: {library_of(job.remote)}"
        times = "attempt" if job.attempts == 1 else "attempts"
        raise job.error(
            f"cannot be fetched, {job.attempts} {times} in {job.elapsed_s:.1f} s "
            f"({_what_failed(error)}: {error}); {way_out}"
        ) from error
    return Fetched(attempts=job.attempts, elapsed_s=job.elapsed_s)


def _what_failed(error: BaseException) -> str:
    status = status_of(error)
    kind = type(error).__name__
    return kind if status is None else f"HTTP {status}, {kind}"


def fetch_if_there(files: StreamFiles, basename: str, to: Path) -> bool:
    """Bring the length file, which may well not exist; return whether it does.

    A store that may not be listed says "denied" of what does not exist, and a class that fetches in
    its own way may say so with any of Python's errors: both are told, since they may mean more.

    Raises:
        DataError: If the store neither gives it nor says that there is none.
        OSError: If it cannot be written here.
    """
    job = _Job(files, basename, to, None, retried=(Failure.PASSING,))
    try:
        _fetch(job, None)
    except DataError as error:
        cause = error.__cause__ or error
        kind = job.kind_of(cause)
        if kind in (Failure.DENIED, Failure.UNKNOWN):
            logger.warning(
                "%s/%s: was refused (%s: %s) and is taken for none: a node that gets it plans "
                "another sequence; give all nodes the same access to it, or, if there is none, "
                "write it (streampack index)",
                files.remote,
                basename,
                _what_failed(cause),
                cause,
            )
        elif kind is not Failure.MISSING:
            raise
        return False
    return True


class _Job:
    """All attempts at one object."""

    def __init__(
        self,
        files: StreamFiles,
        basename: str,
        to: Path,
        num_bytes: int | None,
        *,
        retried: tuple[Failure, ...] = (Failure.PASSING, Failure.UNKNOWN),
    ) -> None:
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

    def kind_of(self, error: BaseException) -> Failure:
        return kind_of(error, str(self._to))

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
            if check is not None:
                check(path)
            path.replace(self._to)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _is_worth_another(self, error: BaseException) -> bool:
        if isinstance(error, DamagedError):
            self.num_damaged += 1
            return self.num_damaged <= MAX_DAMAGED
        if isinstance(error, StreampackError) or not isinstance(error, Exception):
            return False
        kind = self.kind_of(error)
        if kind is Failure.DENIED and self._was_client_used:
            # Its credentials may have expired; a new client reads them again.
            self._needs_new_client = True
            return True
        if kind is Failure.NO_CREDENTIALS:
            self._num_without_credentials += 1
            return self._num_without_credentials < MAX_WITHOUT_CREDENTIALS
        return kind in self._retried

    def _wait_s(self, state: RetryCallState) -> float:
        longest = min(
            FIRST_WAIT_S * 2 ** min(state.attempt_number - 1, 30),
            self._budget_s / WAITS_PER_BUDGET,
        )
        # Not the `random` that everybody shares: waits must differ between ranks of equal seeds,
        # and a failure must not move the user's own random numbers.
        return random.SystemRandom().uniform(0, longest)

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        # An outage is long and has many witnesses: the 1st, 2nd, 4th, 8th ... failure is told.
        is_told = self.attempts & (self.attempts - 1) == 0
        logger.log(
            logging.WARNING if is_told else logging.DEBUG,
            "%s/%s: attempt %d failed after %.1f s (%s: %s); trying again",
            self._files.remote,
            self._basename,
            self.attempts,
            self.elapsed_s,
            type(error).__name__,
            error,
        )


class _Download:
    """One attempt, in a thread of its own, which is left alone once it is overdue."""

    def __init__(
        self, files: StreamFiles, basename: str, place: Path, needs_new_client: bool
    ) -> None:
        self._files = files
        self._basename = basename
        self._place = place
        self._needs_new_client = needs_new_client
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.is_client_used = False

    def run(self, timeout_s: float) -> Path:
        """Download and return the path; raise what the store's client raised, or TimeoutError."""
        thread = threading.Thread(target=self._work, name="streampack-fetch", daemon=True)
        thread.start()
        try:
            self._ended.wait(max(0.0, timeout_s))
        finally:
            with self._lock:
                self._is_abandoned = not self._ended.is_set()
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
        except BaseException as error:  # carried to the thread that waits
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
        except Exception as error:  # whatever a store's library says to its being made
            raise NoClientError(f"{remote}: {type(error).__name__}: {error}") from error
        if not self.is_client_used:
            ask_for_credentials(client)
        if self._is_abandoned:
            return
        stream._downloader = client
        stream.download_retry = 1  # trying again is done here
        try:
            stream._download_file(self._basename, os.path.relpath(self._path, self._files.folder))
        except BaseException:
            clients.drop(client)
            raise
        if self._is_abandoned:
            clients.drop(client)
        else:
            clients.give_back(remote, timeout_s, client)
