"""The streams of a dataset: a list, a single location, or a registered class by name.

::

    streams=[Stream(...), ...]                                as they are
    remote=..., local=..., split=...                          one Stream
    stream_name="mine", stream_config={...}, remote=...       one of a class that was registered

A name is looked up in this process's registry, in the entry points `streampack.streams` of
installed packages, and in MosaicML's `streams_registry`, in this order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import count
from typing import Any

from streampack.errors import ConfigError, short_text, suggest
from streampack.storage.mosaicml import is_mosaicml_stream, registered_streams
from streampack.streams.sources.chats import Chats
from streampack.streams.sources.shards import Shards
from streampack.streams.sources.texts import Texts
from streampack.streams.sources.token_files import TokenFiles
from streampack.streams.stream import Stream

ENTRY_POINTS = "streampack.streams"
OF_SOURCES = "streampack.sources"
SOURCES: dict[str, Callable[..., Any]] = {
    "shards": Shards,
    "token_files": TokenFiles,
    "texts": Texts,
    "chats": Chats,
}
"""Sources by the names that a YAML config gives them."""
SOURCES_OF_OTHERS: dict[str, Callable[..., Any]] = {}
"""Those that were registered, which a YAML config has in `source`."""

_registered: dict[str, Callable[..., Any]] = {"streampack": Stream}


def register_source(name: str, make: Callable[..., Any]) -> None:
    """Register a source of your own, so that a YAML config can name it.

    Args:
        name: The name, as in ``source: {name: {folder: data}}``. An installed package registers its
            sources by entry points in the group `streampack.sources`.
        make: The class, or a function that returns an instance of it. It is called with the options
            in the config.

    >>> register_source("more_shards", Shards)
    """
    SOURCES_OF_OTHERS[name] = make


def source_named(name: str) -> Callable[..., Any]:
    """Return what makes a source: one that was registered, or that an entry point names."""
    here = SOURCES_OF_OTHERS | SOURCES
    way_out = "register it: streampack.register_source(name, make)"
    return _found("source", name, here, OF_SOURCES, way_out)


def register_stream(name: str, make: Callable[..., Any]) -> None:
    """Register a class of streams for `stream_name`; a later one of the same name replaces it.

    Args:
        name: The name.
        make: A subclass of `Stream` or `streaming.Stream`, or a function that returns an instance
            of one. It is called with remote, local, split and the arguments in `stream_config`.

    >>> register_stream("web", Stream)
    """
    _registered[name] = make


def resolve_streams(
    streams: Sequence[Any] | None,
    location: Mapping[str, Any],
    stream_name: str | None,
    stream_config: Mapping[str, Any] | None,
) -> Sequence[Any]:
    """Return the streams that a dataset's arguments describe: a list, or a single one.

    `location` contains remote, local and split of a single stream. `stream_name` is the registered
    name of its class (None: `streampack.Stream`), and `stream_config` contains more arguments of
    that class. A ConfigError refuses arguments that contradict each other.
    """
    single = {**location, "stream_name": stream_name, "stream_config": stream_config}
    if streams is not None:
        others = [f"{k}={v!r}" for k, v in single.items() if v is not None]
        if others:
            way_out = "pass one or the other"
            if location["split"] is not None:
                way_out += f", and set Stream(..., split={location['split']!r}) on each of a list"
            raise ConfigError(
                f"streams and {', '.join(others)} were passed; these describe a single stream, "
                f"so {way_out}"
            )
        check_streams(streams, Stream)
        return streams
    if stream_name is None and stream_config is None:
        return [Stream(**location)]
    return [make_named_stream(stream_name or "streampack", {**(stream_config or {})}, location)]


def make_named_stream(name: str, config: dict[str, Any], location: Mapping[str, Any]) -> Any:
    """Return a stream of a registered class; `location` adds remote, local and split.

    A ConfigError says that the name is unknown, or that the class does not accept the arguments.
    """
    make = _named(name)
    for key, value in location.items():
        if value is not None and config.get(key) not in (None, value):
            raise ConfigError(
                f"{key}={value!r} and stream_config[{key!r}]={config[key]!r} differ; say it once"
            )
        config[key] = config.get(key) if value is None else value
    try:
        stream = make(**config)
    except (TypeError, ValueError) as error:
        given = ", ".join(sorted(config))
        raise ConfigError(f"stream_name={name!r} cannot be made of {given}: {error}") from error
    check_streams([stream], Stream)
    return stream


def _named(name: str) -> Callable[..., Any]:
    here, way_out = _registered, "register the class: streampack.register_stream(name, make)"
    if find_spec("streaming") is None:
        way_out += "; MosaicML's classes need pip install 'streampack[mosaicml]'"
    elif name not in {*_registered, *entry_points(group=ENTRY_POINTS).names}:
        here = _registered | registered_streams(f"stream_name={name!r}")
    return _found("stream_name", name, here, ENTRY_POINTS, way_out)


def _found(
    option: str, name: str, here: Mapping[str, Callable[..., Any]], group: str, way_out: str
) -> Callable[..., Any]:
    """Return the class that was registered here, or by an entry point of a package."""
    installed = entry_points(group=group)
    if name in here or name in installed.names:
        make: Callable[..., Any] = here[name] if name in here else installed[name].load()
        return make
    known = sorted({*here, *installed.names})
    raise ConfigError(
        f"{option}={name!r} is not one of {'|'.join(known)}{suggest(name, known)}; {way_out}"
    )


def check_streams(streams: object, stream_type: type) -> None:
    """Refuse `streams` unless it is a list or tuple of at least one `stream_type`.

    Where it may be `Stream`, it may also be MosaicML's class of this name.

    >>> check_streams((1, 2), int)
    """
    kind = stream_type.__name__
    if not isinstance(streams, list | tuple):
        way_out = _way_out(streams, stream_type)
        raise ConfigError(f"streams={short_text(streams)} is not a list of streams; {way_out}")
    if not streams:
        raise ConfigError(f"streams={streams!r} is empty; pass at least one Stream")
    for number, stream in enumerate(streams):
        if not _is_a(stream, stream_type):
            raise ConfigError(
                f"streams[{number}]={short_text(stream)} is not of type {kind}; "
                f"{_way_out(stream, stream_type)}"
            )


def unique_names(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once, without creating new duplicates.

    >>> unique_names(["code", "docs", "code"])
    ['code-0', 'docs', 'code-1']
    >>> unique_names(["code", "code", "code-0"])
    ['code-1', 'code-2', 'code-0']
    """
    occurs, numbers = Counter(names), defaultdict[str, Iterator[int]](count)
    unique = []
    for name in names:
        numbered = (f"{name}-{number}" for number in numbers[name])
        is_twice = occurs[name] > 1
        unique.append(next(new for new in numbered if new not in occurs) if is_twice else name)
    return unique


def _is_a(value: object, stream_type: type) -> bool:
    is_theirs = stream_type is Stream and is_mosaicml_stream(value)
    return isinstance(value, stream_type) or is_theirs


def _way_out(value: object, stream_type: type) -> str:
    kind = stream_type.__name__
    if kind == "Stream" and type(value) in SOURCES.values():
        name = type(value).__name__
        return f"a source has its weight in a stream: [Stream({name}(...), proportion=...)]"
    if kind == "Stream" and isinstance(value, str):
        return "pass a path as remote= or local=, or [Stream(local=...)]"
    if kind == "Stream" and not _is_a(value, stream_type) and hasattr(type(value), "__iter__"):
        return (
            "a list of ids or texts is a source: Stream(TokenFiles(rows)), or Stream(Texts(rows, "
            "tokenizer)); PackedIterableDataset([IterableStream(...)]) packs anything that can be "
            "iterated"
        )
    return f"pass a list of {kind} objects: [{kind}(...)]"
