"""Which streams a dataset is made of: a list of them, one place, or a registered class by name.

::

    streams=[Stream(...), ...]                                as they are
    remote=..., local=..., split=...                          one Stream
    stream_name="mine", stream_config={...}, remote=...       one of a class in streams_registry

Cost: none; nothing is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.errors import ConfigError, suggest
from streampack.load.arguments import check_streams
from streampack.streams import Stream, mosaic

__all__ = ["make_named_stream", "resolve_streams"]


def resolve_streams(
    streams: Sequence[Any] | None,
    place: Mapping[str, Any],
    stream_name: str | None,
    stream_config: Mapping[str, Any] | None,
) -> Sequence[Any]:
    """Return the streams that a dataset's arguments speak of.

    Args:
        streams: The streams; None: the other arguments name a single one.
        place: remote, local and split of the single stream.
        stream_name: Its class in MosaicML's `streams_registry`; None: `streampack.Stream`.
        stream_config: More arguments of that class.

    Raises:
        ConfigError: If the arguments contradict each other, or no such class is registered.
    """
    single = {**place, "stream_name": stream_name, "stream_config": stream_config}
    if streams is not None:
        passed = [f"{k}={v!r}" for k, v in single.items() if v is not None]
        if passed:
            way_out = "pass one or the other"
            if place["split"] is not None:
                way_out += f", and set Stream(..., split={place['split']!r}) on each of a list"
            raise ConfigError(
                f"streams and {', '.join(passed)} were passed; these stand for a single stream, "
                f"so {way_out}"
            )
        check_streams(streams, mosaic.Stream)
        return streams
    if stream_name is None and stream_config is None:
        return [Stream(remote=place["remote"], local=place["local"], split=place["split"])]
    return [make_named_stream(stream_name or "streampack", {**(stream_config or {})}, place)]


def make_named_stream(name: str, config: dict[str, Any], place: Mapping[str, Any]) -> Any:
    """Return a stream of a registered class.

    Args:
        name: In `streams_registry`; "streampack" is ours, "stream" is MosaicML's.
        config: Arguments of the class.
        place: remote, local and split, which the class gets too.

    Raises:
        ConfigError: If the name is not known, or the class does not take the arguments.
    """
    known = mosaic.streams_registry.get_all()
    if name not in known:
        raise ConfigError(
            f"stream_name={name!r} is not one of {'|'.join(sorted(known))}{suggest(name, known)}; "
            "register the class: streams_registry.register(name, func=...)"
        )
    for key, value in place.items():
        if value is not None and config.get(key) not in (None, value):
            raise ConfigError(
                f"{key}={value!r} and stream_config[{key!r}]={config[key]!r} differ; say it once"
            )
        config[key] = config.get(key) if value is None else value
    try:
        stream = known[name](**config)
    except (TypeError, ValueError) as error:
        given = ", ".join(sorted(config))
        raise ConfigError(f"stream_name={name!r} cannot be made of {given}: {error}") from error
    check_streams([stream], mosaic.Stream)
    return stream
