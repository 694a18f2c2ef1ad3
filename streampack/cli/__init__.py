"""The command line: the options of all verbs in verbs.py, and one file per verb that runs it."""

from __future__ import annotations

from streampack.cli.app import main

__all__ = ["main"]
