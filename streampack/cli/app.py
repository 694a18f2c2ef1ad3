"""The verbs of the command line, and its error output.

::

    streampack run --help    imports streampack.cli.verbs
    streampack run x.yaml    imports streampack.cli.run, and its dependencies
    Ctrl-C, SIGTERM          one line, exit code 130 or 143
    a mistake                the error, which names the way out
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from streampack.cli.console import Terminated
from streampack.cli.verbs import VERBS
from streampack.errors import BadRowsError, ConfigError, StreampackError

SYSTEM_ERROR = 1
USER_ERROR = 2  # the usual exit code for wrong arguments
BAD_ROWS = 4
INTERRUPTED = 130  # 128 + SIGINT, as in shells
TERMINATED = 143  # 128 + SIGTERM
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Where the function of a verb is, if not in a module of its name.
MODULES = {"demo": "demo.show", "merge": "write"}
MODULES |= dict.fromkeys(("at", "where", "diff"), "lookback")
MODULES |= dict.fromkeys(("simulate", "plan", "report"), "planning")
WARM = "streampack.cli.warm"
NO_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


class VerbGroup(TyperGroup):
    """A command group: errors name the option, and an interrupt is one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            for param in self.commands[ctx.invoked_subcommand].params:
                if param.name == error.option and param.opts[0].startswith("-"):
                    error.args = (f"{param.opts[0]}: {error}",)
            raise
        except KeyboardInterrupt as interrupt:
            is_terminated = isinstance(interrupt, Terminated)
            word = "terminated" if is_terminated else "interrupted"
            _show(f"{word}{''.join(f': {text}' for text in interrupt.args)}")
            raise typer.Exit(TERMINATED if is_terminated else INTERRUPTED) from interrupt


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _runner(name: str, options: type) -> Callable[..., None]:
    """Return a function with a parameter for each option, which imports the verb and runs it."""
    module = f"streampack.cli.{MODULES.get(name, name)}"

    def _run(**values: Any) -> None:
        given, verb, where = options(**values), name, module
        if getattr(given, "warm", False):  # apart, because it needs torch
            verb, where = "warm", WARM
        getattr(import_module(where), f"run_{verb}")(given)

    _run.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
    return _run


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
        context_settings={"token_normalize_func": _with_dashes},
    )

    @app.callback()
    def streampack(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Weighted token streams in, full packs out: mixed and packed on the fly."""

    for name, options in VERBS.items():
        app.command(name, help=options.__doc__)(_runner(name, options))
    return app


def main() -> None:
    """Run the command line; an error is printed as one red line.

    The exit code is 2 for streampack's own errors, 4 for too many bad rows, and 1 for system
    errors, such as a full disk.
    """
    try:
        try:
            build_app()(prog_name="streampack")
        finally:
            sys.stdout.flush()  # a failure at interpreter exit would print a traceback
    except StreampackError as error:
        code = BAD_ROWS if isinstance(error, BadRowsError) else USER_ERROR
        _fail(str(error), code)
    except OSError as error:
        _drop_output()
        way_out = ""
        if error.errno in NO_SPACE:
            way_out = "; free space there, or write elsewhere; no incomplete file has a final name"
        if error.errno in NO_RIGHTS:
            way_out = "; change the rights there, or name a place that you may use"
        _fail(f"{error}{way_out}", SYSTEM_ERROR)


def _fail(text: str, code: int) -> None:
    with suppress(OSError):  # stderr may go to the same full disk
        _show(f"error: {text}")
    sys.exit(code)


def _show(line: str) -> None:
    Console(stderr=True).out(line, style="red", highlight=False)


def _drop_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
