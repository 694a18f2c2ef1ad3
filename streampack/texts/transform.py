"""A user's function from row to row, which worker processes import by its name.

::

    transform="cleaning:no_ads"    {"text": "a", "lang": "en"} --> {"text": "A", ...}, or None

It sees the whole row, and runs before the column of the text is taken. None leaves the row out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

from streampack.errors import ConfigError, short_text
from streampack.texts.inputs.slices import RowBatch
from streampack.texts.inputs.values import BadValueError, RowSelection

Row: TypeAlias = Mapping[str, Any]
WAY_OUT = (
    "write the function into a module that workers can import, say cleaning.py, and pass "
    "transform='cleaning:{name}'"
)


@dataclass(frozen=True, slots=True)
class Transform:
    """A function from row to row, or to None, which leaves the row out.

    >>> Transform.of("copy:copy").load()({"text": "a"})
    {'text': 'a'}
    """

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
        if isinstance(function, str):
            made = cls(function, version)
            made.load()
            return made
        module, name = (getattr(function, each, "") for each in ("__module__", "__qualname__"))
        made = cls(f"{module}:{name}", version)
        last = name.rpartition(".")[2]
        shown = last if last.isidentifier() else "function"
        is_found = (
            callable(function) and name and module not in ("", None, "__main__") and "<" not in name
        )
        if not is_found or made.load() is not function:
            raise ConfigError(
                f"transform={short_text(function)} of {module or 'no module'} cannot be imported "
                f"by other processes; {WAY_OUT.format(name=shown)}"
            )
        return made

    def load(self) -> Callable[[Row], Row | None]:
        """Import and return the function."""
        module, _, name = self.name.partition(":")
        try:
            found: Callable[[Row], Row | None] = attrgetter(name)(import_module(module))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"transform={self.name!r} cannot be imported ({error}); write it as "
                "'module:function', with the folder of the module in PYTHONPATH"
            ) from error
        return found

    def apply(self, batch: RowBatch, selection: RowSelection, uri: str) -> RowBatch:
        """Return the rows of a batch of whole rows, without those that it omits."""
        function = self.load()
        rows = RowBatch.of(selection)
        rows.bad += batch.bad
        for number, row in zip(batch.rows, batch.values, strict=True):
            try:
                made = function(row)
            except Exception as error:  # of the user
                reason = f"transform={self.name!r} raised {type(error).__name__}: {error}"
                rows.refuse(uri, number, reason)
                continue
            try:
                if made is not None and not isinstance(made, Mapping):
                    raise BadValueError(f"returned {short_text(made)}, not a row or None")
                if made is not None:
                    rows.add(selection, number, made)
            except BadValueError as error:
                rows.refuse(uri, number, f"after transform={self.name!r}: {error}")
        return rows
