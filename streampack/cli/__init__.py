"""The command line: the options of all verbs in verbs.py, and a file for each that runs it.

In: arguments, YAML files, and JSON of states and statistics. Out: tables or lines of JSON, files,
and an exit code; an error is one line. May import every room; none imports it.

Cost: 0.3 s of CPU time for a help page, which imports neither numpy nor torch.
"""

from __future__ import annotations

from streampack.cli.app import main

__all__ = ["main"]
