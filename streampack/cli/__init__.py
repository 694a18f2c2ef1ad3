"""The command line: one file per verb, imported only when the verb is called."""

from __future__ import annotations

from streampack.cli.app import main

__all__ = ["main"]
