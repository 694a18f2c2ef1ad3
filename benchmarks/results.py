"""The lines of a run, found by bench and parameters.

::

    results.jsonl --> Results --> one("plan/web", packs=True)["median"]

Of several lines with the same bench and parameters, the last one counts, so a bench can be rerun.

Cost: milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Line", "Results"]

Line = dict[str, Any]


class Results:
    """Lines of one or more files.

    >>> results = Results([{"bench": "plan/web", "params": {"packs": True}, "median": 5.0}])
    >>> results.one("plan/web", packs=True)["median"], results.one("plan/sft")
    (5.0, None)
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        kept: dict[str, Line] = {}
        for line in lines:
            key = json.dumps([line["bench"], line["params"]], sort_keys=True)
            kept.pop(key, None)
            kept[key] = line
        self.lines = list(kept.values())

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Results:
        """Return the lines of these files; those that are not there hold none."""
        texts = [path.read_text() for path in paths if path.exists()]
        return cls(json.loads(row) for text in texts for row in text.splitlines())

    def group(self, prefix: str, **params: Any) -> Iterator[Line]:
        """Yield the measured lines with this prefix of the bench and these parameters."""
        for line in self.lines:
            is_measured = line["bench"].startswith(prefix) and "skipped" not in line
            if is_measured and params.items() <= line["params"].items():
                yield line

    def one(self, bench: str, **params: Any) -> Line | None:
        """Return one measured line; None if it is not there."""
        return next((li for li in self.group(bench, **params) if li["bench"] == bench), None)

    def skipped(self) -> list[Line]:
        """Return the lines of skipped measurements."""
        return [line for line in self.lines if "skipped" in line]
