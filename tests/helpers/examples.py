"""The examples and cases per law: few on each change, all of them at night.

``make quick`` reduces all to `STREAMPACK_TEST_EXAMPLES`; ``make coverage``, which runs every night,
sets it above all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

MOST = os.environ.get("STREAMPACK_TEST_EXAMPLES")


def examples(number: int, *, many: int | None = None, **more: Any) -> settings:
    """Return settings for this many examples, or for the environment's number up to `many`.

    `many` is for laws whose examples take long.
    """
    return settings(max_examples=min(many or number, int(MOST)) if MOST else number, **more)


def crossed(*values: Sequence[Any]) -> list[Any]:
    """Return all combinations of some parameters: few on each change, the others marked slow.

    The few have each value at least once: the first of all, the second of all, and so on.
    """
    longest = max(map(len, values))
    few = {tuple(n % len(own) for own in values) for n in range(longest)}
    return [
        pytest.param(
            *(own[n] for own, n in zip(values, numbers, strict=True)),
            marks=[] if numbers in few else [pytest.mark.slow],
        )
        for numbers in product(*(range(len(own)) for own in values))
    ]
