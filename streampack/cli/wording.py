"""Words of the command line: its console, counts, and messages with its options and config keys.

::

    "set tokens= to one of them"     inspect: "set --tokens to one of them"
                                     run:     "set tokens: to one of them"
    "set Order(num_lanes=1)"         run:     "set order.num_lanes: 1"

The package words its messages for Python; only this module rewords them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from rich.console import Console

# Python arguments whose option has another name.
ARGUMENTS: Mapping[str, str] = {
    "check_dtypes": "no_check_dtypes",
    "column": "tokens",
    "dtype": "tokens_dtype",
    "num_ranks": "ranks",
    "num_processes": "workers",
    "extra_fields": "columns",
    "text_field": "text",
    "tokens_field": "tokens",
    "chat_field": "chat",
    "share": "part",
}
VALUE = r"""('[^']*'|"[^"]*"|\.\.\.|[^\s,;()'"]*[^\s,;:.()'"])?"""
# Code that users write in Python is left unchanged.
CODE = r"\b(?:Iterable)?Stream\([^()]*\)|\b\w+\([^()]*=[^()]*\)"
ARGUMENT_IN_TEXT = re.compile(rf"({CODE})|(?<![\w.?&/-])([a-z_]+)={VALUE}")
UNSTATED = (None, "...")  # values; True and False too for an option, as a flag takes none
PIPE_COLUMNS = 240  # rich assumes 80, and would cut the numbers of wide tables
CONFIG = re.compile(r"\b(Packing|Mixing|Order|Buffers)\(([a-z_]+)=([^()]*)\)")


def output_console() -> Console:
    """Return a console for tables, wide enough for all of them in a file or a pipe."""
    is_known = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=None if is_known else PIPE_COLUMNS)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted(1, "shard"), counted(1200, "bad row")
    ('1 shard', '1,200 bad rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_words_of_options(
    text: str,
    options: Mapping[str, str],
    unstated: Sequence[str | None] = (*UNSTATED, "True", "False"),
) -> str:
    """Return a message with arguments replaced by their options, without `unstated` values.

    >>> in_words_of_options("set tokens= or out='a b'", {"tokens": "--tokens", "out": "--out"})
    "set --tokens or --out 'a b'"
    """

    def _word(match: re.Match[str]) -> str:
        code, name, value = match.groups()
        if code or name not in options:
            return match.group()
        return options[name] if value in unstated else f"{options[name]} {_plain(value)}"

    return ARGUMENT_IN_TEXT.sub(_word, text)


def in_words_of_config(text: str, keys: set[str]) -> str:
    """Return a message with arguments replaced by config keys.

    >>> in_words_of_config("set Mixing(epoch_end='carry') or tokens= and x=1", {"tokens"})
    'set mixing.epoch_end: carry or tokens: and x=1'
    """

    def _key(match: re.Match[str]) -> str:
        section, name, value = match.groups()
        value = "" if value == "..." else f" {_plain(value)}"
        return f"{section.lower()}.{name}:{value}"

    in_keys = {key: f"{key}:" for key in keys}
    return in_words_of_options(CONFIG.sub(_key, text), in_keys, UNSTATED)


def _plain(value: str) -> str:
    return value[1:-1] if re.fullmatch(r"'[\w./:-]+'", value) else value
