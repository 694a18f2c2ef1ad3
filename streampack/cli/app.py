"""The verbs of the command line, and its error output.

::

    streampack --help        reads the table below, imports nothing else
    streampack run x.yaml    imports streampack.cli.run, and its dependencies
    Ctrl-C                   one line, exit code 130

Cost: a quarter of a second for ``--help``, most of it Python and rich; torch is not imported.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from streampack.errors import StreampackError

SYSTEM_ERROR = 1
USER_ERROR = 2  # the usual exit code for wrong arguments
INTERRUPTED = 130  # 128 + SIGINT, as in shells

# Verbs whose module has another name.
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


# Former option names: still accepted, but not shown.
RENAMED = {"--column": "--tokens", "--dtype": "--tokens-dtype"}
# Python arguments whose option has another name.
ARGUMENTS = {"column": "tokens", "dtype": "tokens_dtype", "num_processes": "processes"}
ARGUMENTS |= {"extra_fields": "extra"}
PATHS = dict.fromkeys(("local", "remote", "path", "paths"), "PATH")  # where it is not an option


class VerbGroup(TyperGroup):
    """A command group that imports a verb's module only when the verb is called."""

    def __init__(self, **options: Any) -> None:
        # The help page needs only names and summaries.
        stubs = {name: TyperCommand(name, help=summary) for name, summary in VERBS.items()}
        super().__init__(**{**options, "commands": stubs})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace a verb's stub by its real command, then resolve as usual."""
        if args[0] in VERBS:
            self.commands[args[0]] = load_verb(args[0])
        return super().resolve_command(ctx, [args[0], *map(_current_name, args[1:])])

    def invoke(self, ctx: Any) -> Any:
        """Call a verb; its errors are reworded for the command line, an interrupt is one line."""
        try:
            return super().invoke(ctx)
        except StreampackError as error:
            error.args = (_in_words_of(self.commands[ctx.invoked_subcommand], str(error)),)
            raise
        except KeyboardInterrupt as interrupt:
            _show(f"interrupted{''.join(f': {each}' for each in interrupt.args)}")
            raise typer.Exit(INTERRUPTED) from interrupt


def _current_name(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{RENAMED.get(name, name)}{equals}{value}"


def _in_words_of(command: Any, text: str) -> str:
    """Reword a message of the package in terms of a verb's options or config keys."""
    words = import_module("streampack.cli.wording")
    names = {each.name: each.opts[0] for each in command.params}
    if "config" in names:
        keys = import_module("streampack.cli.config").all_keys()
        return str(words.in_words_of_config(text, keys))
    options = {name: option for name, option in names.items() if option.startswith("--")}
    options |= {name: options[given] for name, given in ARGUMENTS.items() if given in options}
    return str(words.in_words_of_options(text, PATHS | options))


def load_verb(name: str) -> Any:
    """Import a verb's module, and return its command."""
    module = f"streampack.cli.{FOLDERS.get(name, name)}"
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(getattr(import_module(module), name.replace("-", "_")))
    return get_command(app)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
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
    """Run the command line; an error is printed as one red line.

    The exit code is 2 for streampack's own errors and 1 for system errors, such as a full disk.
    """
    try:
        try:
            build_app()(prog_name="streampack")
        finally:
            sys.stdout.flush()  # a failure at interpreter exit would print a traceback
    except StreampackError as error:
        _fail(str(error), USER_ERROR)
    except OSError as error:
        _drop_output()
        way_out = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            way_out = "; free space there, or write elsewhere: nothing unfinished is left as whole"
        _fail(f"{error}{way_out}", SYSTEM_ERROR)


def _fail(text: str, code: int) -> None:
    with suppress(OSError):  # stderr may go to the same full disk
        _show(f"error: {text}")
    sys.exit(code)


def _show(line: str) -> None:
    console = Console(stderr=True)
    console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _drop_output() -> None:
    """Discard output that could not be written: Python would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
