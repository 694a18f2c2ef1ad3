"""The demo: what ``make demo`` shows, in five files, one for each thing that happens."""

from __future__ import annotations

from streampack.cli.demo.command import demo

__all__ = ["demo"]
