"""``streampack inspect PATH``: show a stream's contents and one of its packs.

::

    inspect --help    this file
    inspect PATH      streampack.cli.show_stream, and its dependencies

Cost: seconds; without a length file, the first shards are fetched and decompressed.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def inspect(
    path: Annotated[str, Argument(help="The stream's folder, or the URL of a remote one.")],
    pack: Annotated[int, Option(min=1, help="Tokens in the pack that is drawn.")] = 2048,
    tokenizer: Annotated[
        Path | None, Option(help="tokenizer.json to decode with; without it, token ids.")
    ] = None,
    split: Annotated[str | None, Option(help="Subfolder that holds the stream.")] = None,
    tokens: Annotated[
        str, Option(help="Column of the token ids; as the default, input_ids is found too.")
    ] = "tokens",
    tokens_dtype: Annotated[
        str | None, Option(help="Integer type of the ids in a column of bytes.")
    ] = None,
) -> None:
    """Show a stream: its shards, its lengths, one of its packs."""
    work = import_module("streampack.cli.show_stream")
    columns = {"split": split, "tokens": tokens, "tokens_dtype": tokens_dtype}
    work.show_stream(path, pack, tokenizer, columns)
