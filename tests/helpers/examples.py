"""The number of generated examples per law: few on each change, all of them at night.

``make quick`` reduces all to `STREAMPACK_TEST_EXAMPLES`; ``make coverage``, which runs every night,
sets it above all of them.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

MOST = os.environ.get("STREAMPACK_TEST_EXAMPLES")


def examples(number: int, *, many: int | None = None, **more: Any) -> settings:
    """Return settings for this many examples, or for the environment's number up to `many`.

    `many` is for laws whose examples take long.
    """
    return settings(max_examples=min(many or number, int(MOST)) if MOST else number, **more)
