"""``streampack report CONFIG``: a run as one HTML file, for a colleague."""

from __future__ import annotations

from streampack.cli.build import build_dataset
from streampack.cli.config import read_config
from streampack.cli.console import output_console, read_json
from streampack.cli.simulate import world_of
from streampack.cli.verbs import Report
from streampack.report import write_report


def run(options: Report) -> None:
    """Write the report of a config."""
    described = read_config(options.config)
    dataset = build_dataset(described, options.config, world_of(options, described))
    write_report(
        dataset,
        options.out,
        title=str(options.config),
        state=None if options.state is None else read_json(options.state, "state", "state_dict"),
        stats=None if options.stats is None else read_json(options.stats, "stats", "stats"),
        steps=options.steps,
    )
    output_console().out(f"{options.out}: {options.out.stat().st_size:,} bytes", highlight=False)
