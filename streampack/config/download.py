"""`Download`: how the files of a source are fetched, verified and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streampack._checks import check_at_most, is_weight, read_integer, show_number
from streampack.config.moved import with_known_options
from streampack.errors import ConfigError

MAX_RETRY = 10**6
MAX_TIMEOUT_S = 10**6


@with_known_options
@dataclass(frozen=True)
class Download:
    """How the files of a source are fetched, verified and kept.

    Raises:
        ConfigError: If a value is invalid.

    >>> Download(retry=5).timeout
    60.0
    """

    retry: int = 2
    """Further attempts to fetch a file after a failure."""
    timeout: float = 60.0
    """Seconds for an attempt, plus one second for each MB of the file."""
    hash: str | None = None
    """Hash algorithm to verify shards with, such as "sha1"."""
    keep_zip: bool | None = None
    """Whether to keep a compressed file next to the decompressed one. None: only if `local` is the
    stream itself."""

    def __post_init__(self) -> None:
        number = read_integer("retry", self.retry, "write how often to try again, such as 2")
        if number < 0:
            raise ConfigError(f"retry={number} is negative; 0 never tries again", option="retry")
        check_at_most("retry", number, MAX_RETRY)
        timeout: Any = self.timeout
        if not (is_weight(timeout) and 0 < timeout <= MAX_TIMEOUT_S):
            raise ConfigError(
                f"timeout={show_number(timeout)} must be a number of seconds, more than 0 and at "
                f"most {MAX_TIMEOUT_S}",
                option="timeout",
            )
        object.__setattr__(self, "retry", number)
        object.__setattr__(self, "timeout", float(timeout))
