"""The number of generated examples per law, which `make quick` reduces."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

MOST = os.environ.get("STREAMPACK_TEST_EXAMPLES")  # set by make quick


def examples(number: int, **more: Any) -> settings:
    """Return settings for this many examples, or for fewer if the environment asks for that."""
    return settings(max_examples=min(number, int(MOST)) if MOST else number, **more)
