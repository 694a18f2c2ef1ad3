"""``streampack merge PATH``: finish a stream that several machines wrote parts of."""

from __future__ import annotations

from streampack import write
from streampack.cli.verbs import Merge
from streampack.cli.write import show_summary


def run(options: Merge) -> None:
    """Write index.json and the length file, and print the stream's size."""
    written = write.merge(options.path, options.max_bad_rows)
    num_verified = write.verify(options.path) if options.verify else 0
    show_summary(written, as_json=options.as_json, num_verified=num_verified)
