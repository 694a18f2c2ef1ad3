"""Checks of saved states, which may come from a damaged file or an untrusted source.

Both kinds of state have a version, a fingerprint of what determines the batches, and numbers. The
rooms say what a state contains; how a value is checked and reported is the same for all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from streampack.errors import ResumeError
from streampack.types import State

MAX_EPOCH = 10**6  # of a run; with epoch_end="carry" the epochs before it are walked
UNCHANGED = "load what state_dict() returned, unchanged"
WITHOUT_STATE = "resume with the saved value, or start again without the state"


@dataclass(frozen=True, slots=True)
class FieldChecks:
    """Checks of the values of one part of a state. Each raises ResumeError, naming the value."""

    part: str
    """Begins every message, such as "the state's "."""
    way_out: str = UNCHANGED
    """Ends every message."""

    def failure(self, reason: str) -> ResumeError:
        """Return the error for this reason."""
        return ResumeError(f"{self.part}{reason}; {self.way_out}")

    def error(self, name: str, value: Any, *, wanted: str) -> ResumeError:
        """Return the error of a wrong value."""
        return self.failure(f"{name} is {value!r:.80}, not {wanted}")

    def integer(self, name: str, value: Any, least: int, most: int) -> int:
        """Return a value that must be an integer from `least` to `most`; a bool is none."""
        if type(value) is not int or not least <= value <= most:
            raise self.error(
                name, value, wanted=f"an integer of at least {least} and at most {most}"
            )
        return value

    def items(self, name: str, value: Any, length: int) -> list[Any]:
        """Return a value that must be a list of `length`."""
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self.error(name, value, wanted=f"a list of {length}")
        return list(value)

    def up_to(self, name: str, value: Any, most: int) -> list[Any]:
        """Return a value that must be a list of at most `most`."""
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, value, wanted=f"a list of at most {most}")
        return value

    def mapping(self, name: str, value: Any) -> dict[str, Any]:
        """Return a value that must be a dict."""
        if not isinstance(value, dict):
            raise self.error(name, value, wanted="a dict")
        return value


def saved_fingerprint(state: State) -> dict[str, Any]:
    """Return the fingerprint of a state, or raise a ResumeError."""
    fingerprint = state.get("fingerprint")
    if not isinstance(fingerprint, dict):
        raise ResumeError(f"the state has no fingerprint; {UNCHANGED}")
    return fingerprint


def field_difference(key: str, saved: Any, own: Any, way_out: str = WITHOUT_STATE) -> str:
    """Return the message for a field of the fingerprint that has another value."""
    return (
        f"the state was saved with {key}={saved!r:.400}, but this dataset has {key}={own!r}; "
        f"{way_out}"
    )


def canonical_json(value: Any) -> str:
    """Return canonical JSON for comparison; a value that is not JSON equals no saved value."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        return f"not JSON: {type(error).__name__}"
