"""Iterations that are under way end before the interpreter does.

::

    the script is over --atexit--> iterations are closed --> their threads and workers end
                                                             modules are cleared

Python clears the modules before it drops what a script still holds. An iteration that ended only
then would find nothing any more that it ends its threads with.

Cost: a weak reference an iteration.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

__all__ = ["ended_at_exit"]

Item = TypeVar("Item")


def ended_at_exit(iteration: Generator[Item, None, None]) -> Iterator[Item]:
    """Return an iteration, which is closed at the interpreter's exit if it is still held then."""
    _under_way().add(iteration)
    return iteration


@cache
def _under_way() -> weakref.WeakSet[Generator[Any, None, None]]:
    iterations: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
    atexit.register(_end, iterations)
    return iterations


def _end(iterations: weakref.WeakSet[Generator[Any, None, None]]) -> None:
    for iteration in list(iterations):
        with suppress(ValueError):  # another thread is in it
            iteration.close()
