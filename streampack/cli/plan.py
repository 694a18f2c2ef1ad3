"""``streampack plan CONFIG``: the chapters of a run, before it runs."""

from __future__ import annotations

from streampack import report
from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.console import output_console, print_json, read_json
from streampack.cli.verbs import Plan
from streampack.report.chapters import chapters_view, describe_uses, uses_lines
from streampack.world import World


def run(options: Plan) -> None:
    """Show the chapters of a config."""
    described = read_config(options.config)
    dataset = build_dataset(described, options.config, World())
    state = None if options.state is None else read_json(options.state, "state", "state_dict")
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
