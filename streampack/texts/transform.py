"""A user's function from row to row, which worker processes import by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transform:
    """A function from row to row, or to None, which leaves the row out."""

    name: str
    """Where it is imported from: "module:function"."""
    version: str = "1"
    """Its version, to be changed with it: both are in the names of token shards."""

    @classmethod
    def of(cls, function: str | Callable[[Row], Row | None], version: str = "1") -> Transform:
        """Return the transform of an importable function, or of its name.

        Raises:
            ConfigError: If it cannot be imported by name, such as a lambda.
        """
        raise NotImplementedError

    def load(self) -> Callable[[Row], Row | None]:
        """Import and return the function."""
        raise NotImplementedError
