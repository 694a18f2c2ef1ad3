"""Where a stream's files are, and how one of them is fetched.

::

    Stream(remote, local, split, ...) --copied--> StreamFiles --fetch--> local, temporary name

Every fetch makes a downloader of its own: none crosses a fork, and no two threads share one.

Cost: a copy of the file; for stores, also a new connection for each file.
"""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.errors import DataError
from streampack.streams import mosaic

__all__ = ["StreamFiles"]

DEFAULT_RETRY = 2
DEFAULT_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFiles:
    """Where a stream's files are and how they are fetched: a `Stream`'s arguments, none unset."""

    stream: Any
    """A copy of the `Stream`, with defaults for what was unset; the user's is never written to."""
    folder: Path
    """Its local folder, the split included."""
    remote: str | None
    """Its remote folder, the split included."""

    @classmethod
    def of(cls, stream: Any) -> StreamFiles:
        """Take what is needed from a `Stream`, ours or MosaicML's, without changing it."""
        own = copy.copy(stream)
        for field, default in (
            ("download_retry", DEFAULT_RETRY),
            ("download_timeout", DEFAULT_TIMEOUT_S),
            ("keep_zip", False),
        ):
            if getattr(own, field, None) is None:
                setattr(own, field, default)
        # A downloader may hold a client, which must not reach another thread or process.
        own._downloader = None
        own.safe_keep_zip = own.keep_zip or own.remote in (None, own.local)
        split = own.split or ""
        return cls(
            stream=own,
            folder=Path(own.local, split),
            remote=own.remote and os.path.join(own.remote, split).rstrip("/"),
        )

    @property
    def remote_folder(self) -> Path | None:
        """The remote where it is a folder of this machine, and not a store; None otherwise."""
        return None if self.remote is None or "://" in self.remote else Path(self.remote)

    def fetch(self, basename: str, to_basename: str) -> Path:
        """Copy a remote file into the local folder under another name, trying as often as asked.

        Raises:
            DataError: If the store does not give it.
        """
        stream = copy.copy(self.stream)
        stream._downloader = mosaic.CloudDownloader.get(stream.remote)
        stream.download_retry = max(1, stream.download_retry)
        try:
            return Path(stream._download_file(basename, to_basename))
        except Exception as error:  # every store has errors of its own
            raise DataError(
                f"{self.remote}/{basename}: cannot be fetched in {stream.download_retry} attempts "
                f"of {stream.download_timeout} s ({type(error).__name__}: {error}); check the path "
                "and the access to it, or raise download_retry= and download_timeout="
            ) from error
        finally:
            stream._downloader.clean_up()

    def fetch_if_there(self, basename: str, to_basename: str) -> Path | None:
        """Copy a remote file that may well not exist: one attempt, None if the store has none."""
        if self.remote_folder is not None:
            there = (self.remote_folder / basename).exists()
            return self.fetch(basename, to_basename) if there else None
        downloader = mosaic.CloudDownloader.get(self.remote)
        target = self.folder / to_basename
        try:
            downloader.download(
                f"{self.remote}/{basename}", str(target), self.stream.download_timeout
            )
        except Exception as error:  # every store has its own way to say that there is no such file
            logger.debug("no %s at %s: %s", basename, self.remote, error)
            target.unlink(missing_ok=True)
            return None
        finally:
            downloader.clean_up()
        return target
