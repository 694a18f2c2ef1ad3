"""``streampack demo``: real text, a small model, a crash and an exact resume.

::

    demo --help    this file
    demo           streampack.cli.demo.show, and its dependencies

Cost: about a minute on two cores.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Option

from streampack._paths import local_path

NUM_STEPS = 30


def demo(
    config: Annotated[Path, Option(help="The mix; its streams are written where it says.")] = Path(
        "configs/demo.yaml"
    ),
    out: Annotated[Path, Option(help="Folder for all else.")] = Path("demo-output"),
    steps: Annotated[int, Option(min=4, help="Training steps, over both processes.")] = NUM_STEPS,
) -> None:
    """Real text, a small model, a crash and an exact resume; offline."""
    import_module("streampack.cli.demo.show").show_demo(config, local_path(out, "out"), steps)
