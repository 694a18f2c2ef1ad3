"""What a run will give, before it runs: the work of ``streampack simulate``.

::

    config --> dataset --> streampack.report.simulate --> a table, or one JSON line

Cost: planning, some 0.4 us a sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.report import simulate, simulation_view
from streampack.world import World

__all__ = ["show_simulation"]


def show_simulation(
    config: Path, steps: int | None, ranks: tuple[int, int | None], as_json: bool
) -> None:
    """Plan the batches that a config describes, and print what they will be.

    Args:
        config: The run's YAML.
        steps: Batches of each rank; None: one epoch.
        ranks: How many train together, and how many of them on a node; None: all.
        as_json: Whether to print one JSON line, and no table.

    Raises:
        ConfigError: If the config cannot work.
        DataError: If a stream is not what it should be.
    """
    described = read_config(config)
    world = World(num_ranks=ranks[0], ranks_per_node=ranks[1])
    numbers = simulate(build_dataset(described, config, world), steps=steps)
    if as_json:
        sys.stdout.write(json.dumps({"config": str(config), **numbers}) + "\n")
        return
    Console().print(simulation_view(numbers, weight_unit=described.mixing.weight_unit))
