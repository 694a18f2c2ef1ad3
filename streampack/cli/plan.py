"""``streampack plan CONFIG``: the chapters of a run, before it runs.

::

    config --> dataset --> streampack.report.describe_run --> a table, a picture, or one JSON line

Cost: opening the streams; nothing is planned or read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streampack import report
from streampack._paths import local_path
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.console import output_console, print_json
from streampack.cli.verbs import Plan
from streampack.errors import ConfigError
from streampack.report.chapters import chapters_view, describe_uses, uses_lines
from streampack.world import World


def run(options: Plan) -> None:
    """Show the chapters of a config."""
    described = read_config(options.config)
    dataset = build_dataset(described, options.config, World())
    state = None if options.state is None else _read_state(options.state)
    if described.chapters is None and (uses := describe_uses(dataset)):
        if options.as_json:
            print_json({"config": str(options.config), "uses": uses})
        else:
            output_console().print("\n".join(uses_lines(uses)), markup=False, highlight=False)
        return
    chapters = report.describe_run(dataset, state)
    if options.picture is not None:
        report.plot_run(dataset, options.picture)
    if options.as_json:
        print_json({"config": str(options.config), **chapters})
        return
    output_console().print(chapters_view(chapters))


def _read_state(path: Path) -> Any:
    try:
        return json.loads(local_path(path, "state").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"state={path}: cannot be read ({error.strerror}); name a file with the JSON "
            "of loader.state_dict()"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"state={path}: is not JSON ({error}); write it as json.dump(loader.state_dict(), file)"
        ) from error
