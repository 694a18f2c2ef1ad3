"""``streampack compare-packers``: every packer on the same lengths, side by side.

::

    compare-packers --help     this file
    compare-packers            streampack.cli.show_packers, and its dependencies

Cost: about ten seconds for each kind of lengths.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

from typer import Option


def compare_packers(  # noqa: PLR0913 - one option each
    max_seq_len: Annotated[
        list[int] | None, Option(min=8, help="Tokens in a pack; give several to compare: 8192.")
    ] = None,
    samples: Annotated[int, Option(min=1, help="Samples of each kind of lengths.")] = 100_000,
    stream: Annotated[
        list[str] | None, Option(help="A stream whose lengths are packed too, in random order.")
    ] = None,
    split: Annotated[str | None, Option(help="Subfolder that holds each stream.")] = None,
    tokens: Annotated[
        str, Option(help="Column of the token ids; as the default, input_ids is found too.")
    ] = "tokens",
    tokens_dtype: Annotated[
        str | None, Option(help="Integer type of the ids in a column of bytes.")
    ] = None,
    kind: Annotated[
        list[str] | None, Option(help="Made-up lengths: web, sft, code, long; by default all.")
    ] = None,
    markdown: Annotated[bool, Option("--markdown", help="Print one table of Markdown.")] = False,
) -> None:
    """Pack the same lengths with every packer, and compare."""
    work = import_module("streampack.cli.show_packers")
    columns = {"split": split, "tokens": tokens, "tokens_dtype": tokens_dtype}
    streams = work.open_paths(stream or [], columns)
    work.show_packers(max_seq_len or [8192], samples, streams, kind, markdown)
