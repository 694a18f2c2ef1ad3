"""An extension of griffe: doctests outside an `Examples` section become blocks of code on the site.

Used by `zensical.toml`. Without it, Markdown takes `>>>` for quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?m)^>>> .*\n?(?:(?!\s*$).*\n?)*")


class Doctests(griffe.Extension):
    """Puts doctests of docstrings between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"```pycon\n{found.group().rstrip()}\n```\n", obj.docstring.value
            )
