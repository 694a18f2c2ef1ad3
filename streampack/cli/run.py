"""``streampack run CONFIG``: iterate the loader without a model, with a live table.

::

    run --help    this file
    run CONFIG    streampack.cli.take_batches, and its dependencies

Cost: that of the loader; the table takes about a hundredth of one core.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def run(
    config: Annotated[Path, Argument(help="A run's YAML, such as configs/demo.yaml.")],
    steps: Annotated[
        int | None, Option(min=1, help="Batches to take, over as many epochs as that needs.")
    ] = None,
    workers: Annotated[
        int | None, Option(min=0, help="Reading processes, in place of the config's num_workers.")
    ] = None,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON line at the end, and no table.")
    ] = False,
) -> None:
    """Mix and pack as a config says, and show what comes out.

    Without --steps it takes one epoch.
    """
    work = import_module("streampack.cli.take_batches")
    work.take_batches(config, steps, workers, as_json)
