"""From a checked config to the objects it speaks of; nothing is decided here.

Cost: importing torch and MosaicML Streaming, a few seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streampack.cli.config import RunConfig
from streampack.errors import ConfigError
from streampack.load import PackedStreamingDataset
from streampack.load.sources import make_named_stream
from streampack.streams import Stream
from streampack.world import World

__all__ = ["build_dataset", "build_streams"]


def build_dataset(
    config: RunConfig, path: Path, world: World | None = None
) -> PackedStreamingDataset:
    """Return the dataset that a config describes.

    Args:
        config: What was read.
        path: The file it came from, for messages.
        world: The process among others that it is for; None: this one.

    Raises:
        ConfigError: If its weights, sizes or buffers cannot work together.
        DataError: If a stream is not there, or not what it should be.
    """
    try:
        return PackedStreamingDataset(
            streams=build_streams(config),
            packing=config.packing,
            mixing=config.mixing,
            order=config.order,
            buffers=config.buffers,
            batch_size=config.batch_size,
            world=world,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def build_streams(config: RunConfig) -> list[Any]:
    """Return the streams that a config describes; an error names the one it is about."""
    streams: list[Any] = []
    for number, described in enumerate(config.streams):
        arguments, more = described.arguments(), described.stream_config
        try:
            if described.stream_name is None and more is None:
                streams.append(Stream(**arguments))
            else:
                name = described.stream_name or "streampack"
                streams.append(make_named_stream(name, {**(more or {})}, arguments))
        except ConfigError as error:
            raise ConfigError(f"streams.{number}: {error}") from error
    return streams
