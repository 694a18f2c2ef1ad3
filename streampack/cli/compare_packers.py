"""``streampack compare-packers``: every packer on the same lengths, side by side.

::

    compare-packers --help     this file
    compare-packers            streampack.cli.show_packers, and what that needs

Cost: about ten seconds for each kind of lengths.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

from typer import Option

__all__ = ["compare_packers"]


def compare_packers(
    max_seq_len: Annotated[
        list[int] | None, Option(min=8, help="Tokens in a pack; give several to compare: 8192.")
    ] = None,
    samples: Annotated[int, Option(min=1, help="Samples of each kind of lengths.")] = 100_000,
    stream: Annotated[
        list[str] | None, Option(help="A stream whose lengths are packed too, in random order.")
    ] = None,
    kind: Annotated[
        list[str] | None, Option(help="Made-up lengths: web, sft, code, long; by default all.")
    ] = None,
    markdown: Annotated[bool, Option("--markdown", help="Print one table of Markdown.")] = False,
) -> None:
    """Pack the same lengths with every packer, and compare."""
    work = import_module("streampack.cli.show_packers")
    work.show_packers(max_seq_len or [8192], samples, stream or [], kind, markdown)
