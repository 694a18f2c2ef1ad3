"""How many generated examples a law is tried on, also in `make quick`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

MOST = os.environ.get("STREAMPACK_TEST_EXAMPLES")  # set by make quick


def examples(number: int, **more: Any) -> settings:
    """Return settings for so many examples, or for the fewer that the environment asks for."""
    return settings(max_examples=min(number, int(MOST)) if MOST else number, **more)
