"""``streampack where CONFIG web/123456``: in which steps of a run a sample was."""

from __future__ import annotations

from streampack.cli.at import open_run, progress, row_as_json, row_lines
from streampack.cli.console import output_console, print_json
from streampack.cli.verbs import Where
from streampack.errors import ConfigError
from streampack.lookback import where


def run(options: Where) -> None:
    """Show the rows in which a sample was."""
    stream, _, number = options.sample.rpartition("/")
    if not stream or not number.isdecimal():
        raise ConfigError(
            f"sample={options.sample!r:.80} is not a stream and a number; write web/123456"
        )
    dataset, index = open_run(options)
    with progress("searched", options.upto) as report:
        found = where(dataset, stream, int(number), upto=options.upto, index=index, report=report)
    rows = [
        {"step": each.step, "is_skipped": each.is_skipped, **row_as_json(dataset, each.row)}
        for each in found
    ]
    if options.as_json:
        print_json({"config": str(options.config), "sample": options.sample, "rows": rows})
        return
    console = output_console()
    for row in rows:
        skipped = ", skipped" if row["is_skipped"] else ""
        console.print(f"step {row['step']}{skipped}", highlight=False)
        console.print(row_lines(row))
    if not rows:
        console.print(f"{options.sample} is in no step of the run", highlight=False)
