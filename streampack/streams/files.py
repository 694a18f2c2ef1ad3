"""Where a stream's files are, here and at its remote.

::

    Stream(remote, local, split, ...) --copied--> StreamFiles --> fetch.py, cache.py

Cost: none; nothing is looked at.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streampack.paths import folder_of

__all__ = ["StreamFiles"]

DEFAULT_RETRY = 2
DEFAULT_TIMEOUT_S = 60.0


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
        folder = None if self.remote is None else folder_of(self.remote)
        return None if folder is None else Path(folder)
