"""Simulate a run from its config: the implementation of ``streampack simulate``.

::

    config --> dataset --> streampack.report.simulate --> a table, or one JSON line

Cost: planning, about 0.4 us per sample.
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


def show_simulation(
    config: Path, steps: int | None, ranks: tuple[int, int | None], as_json: bool
) -> None:
    """Plan the batches of a config, and print their statistics.

    Args:
        config: The run's YAML.
        steps: Batches of each rank; None: one epoch.
        ranks: Number of ranks, and of ranks per node; None: all on one node.
        as_json: Print one JSON line instead of a table.

    Raises:
        ConfigError: If the config is invalid.
        DataError: If a stream is invalid.
    """
    described = read_config(config)
    world = World(num_ranks=ranks[0], ranks_per_node=ranks[1])
    numbers = simulate(build_dataset(described, config, world), steps=steps)
    if as_json:
        sys.stdout.write(json.dumps({"config": str(config), **numbers}) + "\n")
        return
    Console().print(simulation_view(numbers, weight_unit=described.mixing.weight_unit))
