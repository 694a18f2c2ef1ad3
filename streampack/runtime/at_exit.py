"""Close running iterations before the interpreter clears its modules.

Python clears modules before it drops the objects that a script still has. Iterators finalized
that late can no longer join their threads, because module globals are gone.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

_T = TypeVar("_T")


def close_at_exit(iteration: Generator[_T, None, None]) -> Iterator[_T]:
    """Return an iterator that is closed at the interpreter's exit if it is still referenced."""
    _under_way().add(iteration)
    return iteration


@cache
def _under_way() -> weakref.WeakSet[Generator[Any, None, None]]:
    iterations: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
    atexit.register(_end, iterations)
    return iterations


def _end(iterations: weakref.WeakSet[Generator[Any, None, None]]) -> None:
    for iteration in list(iterations):
        with suppress(ValueError):  # another thread is running it
            iteration.close()
