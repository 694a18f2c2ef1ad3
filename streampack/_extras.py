"""Import what an extra installs, at its first use, and recognize its objects without that."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from streampack.errors import ConfigError


def import_extra(module: str, extra: str, purpose: str, otherwise: str = "") -> Any:
    """Return a module; raise a ConfigError with the command that installs it if it is missing.

    The message begins with `purpose`, and ends with `otherwise`, another way out.
    """
    try:
        return import_module(module)
    # Importing torchvision, which some need, is a RuntimeError if torch is of another build.
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{purpose} needs {module.partition('.')[0]} ({error}); pip install "
            f"'streampack[{extra}]'{otherwise and f', or {otherwise}'}"
        ) from error


def is_from(source: object, library: str, name: str) -> bool:
    """Return whether a source is an instance of a library's class, without importing it."""
    for base in type(source).__mro__:
        if base.__name__ == name and base.__module__.partition(".")[0] == library:
            return True
    return False


def installed(name: str) -> str | None:
    """Return the version of a distribution, or None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
