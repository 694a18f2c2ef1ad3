"""The table of options that moved, of which docs/moved-options.md is made, and a check of names.

::

    Stream(download_retry=5)     ConfigError: ... write download=Download(retry=5)
    Shards(remoet="s3://b")      ConfigError: ... did you mean 'remote'?
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import signature
from reprlib import repr as short_repr
from typing import Any, TypeVar

from streampack.errors import ConfigError, short_text, suggest

Kind = TypeVar("Kind", bound=type)

KEPT = {
    "Stream": "name proportion repeat choose loss_weight max_seq_len overflow bos_id eos_id",
    "Shards": "remote split check_dtypes check_remote",
    "Shards TokenFiles": "format tokens labels labels_shifted loss_mask index split_at",
    "Shards TokenFiles Texts Chats": "local",
    "TokenFiles": "trailing",
    "TokenFiles Texts Chats": "on_bad_row",
    "Texts": "text",
    "Texts Chats": "tokenizer",
    "Chats": "train_on chat_template template_kwargs context_roles ignore_fields",
}
"""Options of the former `Stream` and of its `chat` that have the same names, by their classes."""
MOVED = {
    name: " or ".join(f"{of}({name}={{value}})" for of in classes.split())
    for classes, names in KEPT.items()
    for name in names.split()
} | {
    "download_retry": "download=Download(retry={value})",
    "download_timeout": "download=Download(timeout={value})",
    "validate_hash": "download=Download(hash={value})",
    "keep_zip": "download=Download(keep_zip={value})",
    "shards": "Shards(only={value}) or Stream(only={value})",
    "tokens_dtype": "Shards(tokens='tokens:{bare}') or TokenFiles(dtype='{bare}')",
    "labels_dtype": "Shards(labels='labels:{bare}')",
    "loss_mask_dtype": "Shards(loss_mask='loss_mask:{bare}')",
    "rows": "Texts(files={value}) or Chats(files={value}) or TokenFiles(files={value})",
    "chat": "Chats(files=..., tokenizer=..., chat='messages')",
    "samples": "TokenFiles(only={value})",
    "unit": "TokenFiles(unit='sequence') or held_out=HeldOut(side=..., fraction=..., by=...)",
    "part": "held_out=HeldOut(side={value}, fraction=..., by=...)",
    "fraction": "held_out=HeldOut(side=..., fraction={value}, by=...)",
    "begins_with_bos": "TokenFiles(has=['bos']) or TokenFiles(has=[])",
    "ends_with_eos": "TokenFiles(has=['eos']) or TokenFiles(has=[])",
    "length_fn": "IterableStream(source, payloads=Payloads({'images': 'at'}, cost={value}))",
    "split_payloads": "IterableStream(source, payloads=Payloads({'images': 'at'}, split={value}))",
    "on_bad_sample": "IterableStream(source, on_bad_row='skip') or IterableStream(source)",
    "max_bad_samples": "IterableStream(source, on_bad_row={value})",
}
"""What to write for each option that `Stream` had when it was all sources in one, and for those of
`IterableStream` that became others."""
CALL = re.compile(r"(?:\w+=)?([A-Z]\w+)\((.*?)\)")


def line_of(name: str, value: object, *, is_yaml: bool = False) -> str:
    """Return what to write in place of an option that moved; empty for others.

    >>> line_of("download_retry", 5), line_of("download_retry", 5, is_yaml=True)
    ('download=Download(retry=5)', 'download: {retry: 5}')
    """
    line, shown = MOVED.get(name, ""), short_text(value)
    if is_yaml and not line.startswith("Iterable"):  # YAML has none
        line, shown = CALL.sub(_in_yaml, line), f"{json.dumps(value, default=str):.200}"
    return line.replace("{value}", shown).replace("{bare}", shown.strip("'\""))


def _in_yaml(call: re.Match[str]) -> str:
    section = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", call[1]).lower()
    keys = f"{{{call[2].replace('=', ': ')}}}"
    return f"streams: [{keys}]" if section == "stream" else f"{section}: {keys}"


def check_options(
    of: str, given: Mapping[str, object], known: Collection[str], **places: str
) -> None:
    """Refuse options that a class does not have, with their places, or the nearest name."""
    for name, value in given.items():
        if name not in known:
            line = places.get(name) or line_of(name, value)
            way_out = f"; write {line}" if line else suggest(name, known)
            raise ConfigError(
                f"{name}={short_text(value)}: not an argument of {of}{way_out}; it takes "
                f"{', '.join(known)}",
                option=name,
            )


def with_known_options(kind: Kind) -> Kind:
    """Let a class refuse options that it does not have, and miss, and show those that are set."""
    # Not by **unknown in the signature, which would hide mistakes from type checkers.
    init: Callable[..., None] = kind.__init__  # type: ignore[misc]
    expected = signature(kind)

    @wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        check_options(kind.__name__, options, expected.parameters)
        try:
            expected.bind(*args, **options)
        except TypeError as error:
            raise ConfigError(
                f"{kind.__name__}: {error}; it takes {', '.join(expected.parameters)}"
            ) from None
        init(self, *args, **options)

    def shown(self: Any) -> str:
        stated = [
            f"{name}={short_repr(value)}"
            for name, each in expected.parameters.items()
            # Rows in memory are never compared.
            if (value := getattr(self, name)) is not each.default
            and not (isinstance(value, PLAIN) and value in (each.default, {}))
        ]
        return f"{kind.__name__}({', '.join(stated)})"

    kind.__init__ = checked  # type: ignore[misc]
    kind.__repr__ = shown  # type: ignore[assignment]
    return kind


PLAIN = (str, int, float, tuple, dict, type(None))
