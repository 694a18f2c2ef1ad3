"""Import what an extra installs, at its first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from streampack.errors import ConfigError


def import_extra(module: str, extra: str, purpose: str, otherwise: str = "") -> Any:
    """Return a module; raise a ConfigError with the command that installs it if it is missing.

    The message begins with `purpose`, and ends with `otherwise`, another way out.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {module.partition('.')[0]} ({error}); pip install "
            f"'streampack[{extra}]'{otherwise and f', or {otherwise}'}"
        ) from error
