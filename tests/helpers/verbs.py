"""Verbs of the command line, called in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from streampack.cli.app import build_app


def call_verb(*arguments: object) -> str:
    """Call a verb; return what it printed, or raise what it raised."""
    done = CliRunner().invoke(build_app(), list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
