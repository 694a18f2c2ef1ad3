"""A dataset as the YAML of its run: what `streampack.from_config` reads, without the defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import yaml

from streampack.balance import AttentionCost, Balance
from streampack.errors import ConfigError, short_text
from streampack.streams import Stream
from streampack.streams.registry import SOURCES, SOURCES_OF_OTHERS
from streampack.streams.sources.values import in_memory
from streampack.streams.stream import OPTIONS

OF_RANKS = ("dp_rank", "dp_size", "dp_ranks", "cp_rank", "group")
ENVIRONMENT = ("rank", "num_ranks", "ranks_per_node", *OF_RANKS)
"""Fields of a world that no config of a run has."""


def config_text(streams: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """Return the YAML of a dataset with these streams and arguments.

    Raises:
        ConfigError: If no YAML can express one of them. The message names it.
    """
    written = [_stream(f"streams.{number}", each) for number, each in enumerate(streams)]
    plain = {
        name: _balance(value) if isinstance(value, Balance) else _plain(name, value)
        for name, value in arguments.items()
    }
    document = {"streams": written} | {
        name: value for name, value in plain.items() if value not in (None, {}, [])
    }
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def _stream(place: str, stream: Any) -> dict[str, Any]:
    if type(stream) is not Stream:
        raise ConfigError(
            f"{place} is a {type(stream).__name__}, and YAML describes objects of Stream; use a "
            "Stream, or write the class as stream_name, with stream_config, into a file of your own"
        )
    source, known = stream.source, [*SOURCES.items(), *SOURCES_OF_OTHERS.items()]
    name = next((name for name, kind in known if kind is type(source)), None)
    if name is None or not is_dataclass(source):
        raise ConfigError(
            f"{place}: its source is a {type(source).__name__}, which YAML has no key for; "
            "use Shards, TokenFiles, Texts or Chats, or register a dataclass by "
            "streampack.register_source(name, make)"
        )
    for option in in_memory(source) if name in SOURCES else ():
        raise ConfigError(
            f"{place}.{option}={short_text(getattr(source, option))} is in memory, and YAML has "
            "paths; save it to files, and name these"
        )
    options = {name: getattr(stream, name) for name in OPTIONS}
    written = {name: _plain(place, source)}
    return (written if name in SOURCES else {"source": written}) | {
        name: _plain(f"{place}.{name}", value)
        for name, value in options.items()
        if value is not None
    }


def _balance(balance: Balance) -> dict[str, Any]:
    if not isinstance(balance.cost, AttentionCost):
        raise _unwritable("balance.cost", balance.cost)
    return {"within": balance.within, **_plain("balance.cost", balance.cost)}


def _plain(place: str, value: Any) -> Any:
    """Return a value as YAML knows it; options without those at their defaults."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, slice) and value.step in (None, 1):
        return [_plain(place, value.start), _plain(place, value.stop)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(f"{place}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{place}.{number}", each) for number, each in enumerate(value)]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real | Decimal):
        number = float(value)
        # Weights are exact: 1/3 has no decimal, and another weight would be another run.
        if isinstance(value, Fraction | Decimal) and Fraction(repr(number)) != Fraction(value):
            raise _unwritable(place, value)
        return int(number) if number.is_integer() else number
    if is_dataclass(value) and not isinstance(value, type):
        stated = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        defaults = {each.name: each.default for each in fields(value)}
        return {
            name: _plain(f"{place}.{name}", option)
            for name, option in stated.items()
            if name not in ENVIRONMENT and option not in (defaults[name], {})
        }
    raise _unwritable(place, value)


def _unwritable(place: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{place}={value!r:.80} cannot be written as YAML, which has text, numbers, lists and "
        "mappings; remove it from the dataset, or replace it by one of these"
    )
