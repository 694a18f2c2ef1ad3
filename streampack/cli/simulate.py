"""``streampack simulate CONFIG``: statistics of a run before it runs.

::

    simulate --help    this file
    simulate CONFIG    streampack.cli.show_simulation, and its dependencies

Cost: planning, about 0.4 us per sample; see `streampack.report.simulate`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def simulate(
    config: Annotated[Path, Argument(help="A run's YAML, such as configs/demo.yaml.")],
    steps: Annotated[
        int | None, Option(min=1, help="Batches of each rank, over as many epochs as that needs.")
    ] = None,
    ranks: Annotated[int, Option(min=1, help="Ranks that train together.")] = 1,
    ranks_per_node: Annotated[
        int | None, Option(min=1, help="Ranks on each node; by default all are on one.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON line, and no table.")] = False,
) -> None:
    """Plan a run as a config says, and show what it will give; no token is read.

    Without --steps it plans one epoch. Numbers are those of all ranks together.
    """
    work = import_module("streampack.cli.show_simulation")
    work.show_simulation(config, steps, (ranks, ranks_per_node), as_json)
