"""The verbs, and the two lines that a person sees of an error.

::

    streampack --help        reads the table below, imports nothing else
    streampack run x.yaml    imports streampack.cli.run, and what that needs

Cost: a quarter of a second for ``--help``, most of it Python and rich; torch is not touched.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from streampack.errors import StreampackError

__all__ = ["build_app", "main"]

USER_ERROR = 2  # the exit code of a wrong argument, here as in any other program

# Verbs that are more than a file, or are no name of one.
FOLDERS = {"demo": "demo.command", "compare-packers": "compare_packers"}

VERBS = {
    "write": "Turn text, JSONL or token ids into a stream.",
    "index": "Write the length files of streams that have none.",
    "inspect": "Show a stream: its shards, its lengths, one of its packs.",
    "run": "Mix and pack as a config says, and show what comes out.",
    "simulate": "Plan a run as a config says, and show what it will give; no token is read.",
    "compare-packers": "Pack the same lengths with every packer, and compare.",
    "demo": "Real text, a small model, a crash and an exact resume; offline.",
}


class VerbGroup(TyperGroup):
    """A group that knows its verbs by name and imports one when it is called."""

    def __init__(self, **options: Any) -> None:
        # For the help page a name and a line are enough.
        stubs = {name: TyperCommand(name, help=summary) for name, summary in VERBS.items()}
        super().__init__(**{**options, "commands": stubs})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the real command in place of its stub, then go on as every group does."""
        if args[0] in VERBS:
            self.commands[args[0]] = load_verb(args[0])
        return super().resolve_command(ctx, args)


def load_verb(name: str) -> Any:
    """Import a verb's module and return its command."""
    module = f"streampack.cli.{FOLDERS.get(name, name)}"
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(getattr(import_module(module), name.replace("-", "_")))
    return get_command(app)


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        Console().print(import_module("streampack").__version__, highlight=False)
        raise typer.Exit


def build_app() -> typer.Typer:
    """Return the command line with all its verbs."""
    app = typer.Typer(
        name="streampack",
        cls=VerbGroup,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def streampack(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Weighted token streams in, full packs out: mixed and packed on the fly."""

    return app


def main() -> None:
    """Run the command line; streampack's own errors are one red line and exit code 2."""
    try:
        build_app()(prog_name="streampack")
    except StreampackError as error:
        console = Console(stderr=True)
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(USER_ERROR)
