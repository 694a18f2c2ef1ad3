"""Download of one object with retries, within a time budget.

Each attempt has its own thread and folder. An overdue attempt is abandoned: its answer is cut off
and its folder is removed. Its thread removes the folder again when it ends.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from streampack.errors import DataError, StreampackError
from streampack.mds.regular_files import check_file
from streampack.storage.location import ShardPart, StreamLocation
from streampack.stores.failures import ChangedError, DamagedError, FailureKind, classify, error_text
from streampack.stores.objects import fetch_parts
from streampack.stores.retries import SLOWEST_BYTES_PER_S, Retries
from streampack.stores.store import Store
from streampack.stores.threads import is_abandoned, within_time

WAY_OUT = "check the path and the access to it, or raise retry and timeout of Download"
TRANSIENT = (FailureKind.TRANSIENT, FailureKind.CHANGED)

logger = logging.getLogger(__name__)


def attempt_s(location: StreamLocation, num_bytes: int | None = None) -> float:
    """Return the time limit of one attempt at an object; its size may be unknown."""
    return float(location.download.timeout) + (num_bytes or 0) / SLOWEST_BYTES_PER_S


def budget_s(location: StreamLocation, num_bytes: int | None = None) -> float:
    """Return the time limit of all attempts at an object: D * (retry + 1)."""
    num_attempts = location.download.retry + 1
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
    """Download one object, or a part of it, within its time budget; return the number of attempts.

    `to` is a temporary path below the local folder; names with this prefix are used too. Larger
    objects get more time. `check` raises DamagedError for a file with wrong bytes, which is then
    discarded and refetched, up to 3 times. Unless `check` compares a hash (`is_hashed`), the
    checksum that the store reports is compared, where its library can compute it. A DataError says
    that the object cannot be fetched, or only damaged; an OSError, that it cannot be written here.
    """
    return _Download(location, basename, to, num_bytes, is_hashed=is_hashed).run(check)


def fetch_if_there(location: StreamLocation, basename: str, to: Path) -> bool:
    """Download the length file, which is optional; return whether it exists.

    A store that denies listing reports "denied" for objects that do not exist. A class with its own
    download may report this with any built-in exception. Both are logged, as they may mean more.
    """
    download = _Download(location, basename, to, None, retried=TRANSIENT)
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
                error_text(cause),
            )
        elif kind is not FailureKind.MISSING:
            raise
        return False
    return True


class _Download:
    def __init__(
        self,
        location: StreamLocation,
        basename: str,
        to: Path,
        num_bytes: int | None,
        *,
        is_hashed: bool = False,
        retried: tuple[FailureKind, ...] = (*TRANSIENT, FailureKind.UNKNOWN),
    ) -> None:
        self._part = location.parts.get(basename)
        self._basename = basename = basename if self._part is None else self._part.name
        self.uri = f"{location.remote}/{basename}"
        self._location = location
        self._to = to
        self._num_bytes = num_bytes
        self._is_hashed = is_hashed
        self._retries = Retries(
            self.uri,
            attempt_s=attempt_s(location, num_bytes),
            budget_s=budget_s(location, num_bytes),
            timeout_s=float(location.download.timeout),
            retried=retried,
            target=str(to),
        )

    def run(self, check: Callable[[Path], None] | None) -> int:
        if (folder := self._location.remote_folder) is not None:
            with suppress(OSError):  # the attempts tell
                check_file(folder / self._basename)
        retries = self._retries
        try:
            retries.run(partial(self._attempt, check))
        except StreampackError:  # from `check`, or from a stream that overrides the download
            raise
        except DamagedError as error:
            raise self._damaged(error) from error
        except Exception as error:  # each store raises its own exceptions
            if classify(error, str(self._to)) is FailureKind.DISK and isinstance(error, OSError):
                raise
            raise retries.error(error, "fetched", WAY_OUT, shard=self._basename) from error
        return retries.num_attempts

    def _damaged(self, error: DamagedError) -> DataError:
        damages, elapsed_s = self._retries.damages, self._retries.elapsed_s
        times = f"the same in {len(damages)} downloads"
        if (num_different := len(set(damages))) > 1:
            times = f"different in {num_different} of {len(damages)} downloads"
        return DataError(
            f"{self.uri}: {error}; {times}, {elapsed_s:.1f} s: rewrite the stream, or, if it "
            f"was replaced since it was first read, delete {self._location.folder}",
            uri=self.uri,
            shard=self._basename,
            attempts=self._retries.num_attempts,
            elapsed_s=elapsed_s,
        )

    def _attempt(self, check: Callable[[Path], None] | None, timeout_s: float) -> None:
        folder = Path(f"{self._to}.{self._retries.num_attempts}")
        path = folder / os.path.basename(self._basename)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            within_time(partial(self._download, path), timeout_s)
            if not path.is_file():
                raise ConnectionError(
                    f"the store's client reported success, but wrote no {path.name}"
                )
            if check is not None:
                check(path)
            path.replace(self._to)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _download(self, path: Path) -> None:
        own, folder = self._location.own_download, self._location.remote_folder
        try:
            if own is not None:
                own(self._basename, path)
            elif self._part is not None:
                self._retries.use_store(partial(self._download_part, path, self._part))
            elif folder is not None:
                shutil.copyfile(folder / self._basename, path)
            else:
                is_checked = not self._is_hashed
                self._retries.use_store(
                    lambda store: store.download(
                        self.uri, path, self._num_bytes, is_checked=is_checked
                    )
                )
        finally:
            if is_abandoned():
                shutil.rmtree(path.parent, ignore_errors=True)

    def _download_part(self, path: Path, part: ShardPart, store: Store) -> None:
        with path.open("wb") as file:
            self._fetch_ranges(file.fileno(), 0, part, store)
            if part.mask is not None:
                self._fetch_ranges(file.fileno(), part.stop - part.start, part.mask, store)

    def _fetch_ranges(self, descriptor: int, at: int, part: ShardPart, store: Store) -> None:
        uri = f"{self._location.remote}/{part.name}"

        def fetch_range(start: int, stop: int) -> None:
            data = store.read(uri, start, stop, version=part.version)
            if len(data) != stop - start:
                raise ChangedError(f"{uri}: ends at byte {start + len(data)} now")
            os.pwrite(descriptor, data, at + start - part.start)

        fetch_parts(fetch_range, part.start, part.stop)
