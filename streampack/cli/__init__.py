"""The command line: one file per verb, each loaded only when it is called."""

from __future__ import annotations

from streampack.cli.app import main

__all__ = ["main"]
