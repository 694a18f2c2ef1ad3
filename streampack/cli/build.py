"""Build the dataset and streams of a checked config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from streampack.balance import AttentionCost, Balance
from streampack.chapters import Chapter, Ramp
from streampack.cli.config import AS_WRITTEN, ChapterConfig, RampConfig, RunConfig, read_config
from streampack.errors import ConfigError
from streampack.planned.dataset import PackedStreamingDataset
from streampack.world import World


def from_config(
    path: str | os.PathLike[str], *, world: World | None = None
) -> PackedStreamingDataset:
    """Return the dataset that a run's YAML describes, as the command line builds it.

    Args:
        path: The YAML file. Relative paths in it start at the working directory.
        world: Rank and number of ranks, in place of the file's `world`. None: from the environment,
            as for `PackedStreamingDataset`.

    Raises:
        ConfigError: If the file or the arguments in it are invalid. The message names the place.

    What the file omits stays open for `with_batches` and for trainers.
    `num_workers` is the loader's, and not used here.
    """
    return build_dataset(read_config(Path(path)), Path(path), world)


def build_dataset(
    config: RunConfig, path: Path, world: World | None = None
) -> PackedStreamingDataset:
    """Return the dataset of a rank that a config describes; a ConfigError names its path.

    Without a world, the rank is that of this process, as the environment says.
    """
    try:
        balance = None
        if config.balance is not None:
            cost = config.balance.model_dump()
            balance = Balance(within=cost.pop("within"), cost=AttentionCost(**cost))
        if world is None and config.world is not None:
            world = World.from_env(os.environ, **config.world.model_dump())
        return PackedStreamingDataset(
            streams=build_streams(config),
            balance=balance,
            chapters=None if config.chapters is None else [_chapter(c) for c in config.chapters],
            world=world,
            **{name: getattr(config, name) for name in AS_WRITTEN},
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", option=error.option) from error


def _chapter(config: ChapterConfig) -> Chapter:
    values = {name: getattr(config, name) for name in config.model_fields_set}
    weights = {
        name: Ramp(weight.start, weight.stop) if isinstance(weight, RampConfig) else weight
        for name, weight in config.weights.items()
    }
    return Chapter(**values | {"weights": weights})


def build_streams(config: RunConfig) -> list[Any]:
    """Return the streams that a config describes; an error names its stream."""
    streams: list[Any] = []
    for number, described in enumerate(config.streams):
        try:
            streams.append(described.build())
        except ConfigError as error:
            raise ConfigError(f"streams.{number}: {error}", option=error.option) from error
    return streams
