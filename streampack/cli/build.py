"""From a checked config to the objects it speaks of; nothing is decided here.

Cost: importing torch and MosaicML Streaming, a few seconds.
"""

from __future__ import annotations

from streampack.cli.config import RunConfig
from streampack.load import PackedStreamingDataset
from streampack.streams import Stream

__all__ = ["build_dataset"]


def build_dataset(config: RunConfig) -> PackedStreamingDataset:
    """Return the dataset that a config describes.

    Raises:
        ConfigError: If its weights, sizes or buffers cannot work together.
        DataError: If a stream is not there, or not what it should be.
    """
    return PackedStreamingDataset(
        streams=[Stream(**stream.arguments()) for stream in config.streams],
        packing=config.packing,
        mixing=config.mixing,
        order=config.order,
        buffers=config.buffers,
        batch_size=config.batch_size,
    )
