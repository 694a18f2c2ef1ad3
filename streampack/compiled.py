"""Decorators for the integer kernels: numba, cached on disk where it can be.

::

    compiled            a kernel that works on the arrays that it is given, without the GIL
    compiled_inline     a part of one, put into whatever calls it
    compiled_brief      one that is called from Python and takes some us: it keeps the GIL
    compiled_to_make    one that makes arrays, or gets some that another kernel has made

Where two threads are at work, whoever lets go of the GIL may have to sleep until the other does: a
wait of tens of us, worth it for a kernel of hundreds.

numba counts references to an array wherever a kernel takes a part of it or hands it on: an atomic
operation, for which a processor waits until all that it was asked for is read and written. Arrays
that Python holds on to meanwhile need no counting, so `compiled` leaves it out: on short samples
that took a fifth off the gather.

What is compiled first, after an install, takes time that the first batch waits for: some 12 s. An
assignment of one part of an array to another takes 4 s more, since its error would name the shapes.

numba refuses ``cache=True`` where it can write neither beside the module, nor in the user's cache
folder, nor in NUMBA_CACHE_DIR; then kernels are compiled in memory, seconds in every process.

The cache sees that the file of a kernel has changed, and not that a file with kernels it calls has:
keep kernels that call each other in one file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core.options import DefaultOptions

__all__ = ["compiled", "compiled_brief", "compiled_inline", "compiled_to_make"]

P = ParamSpec("P")
R = TypeVar("R")

# numba has a private name for the runtime that counts; without that option kernels only get slower.
_UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

_warned: set[str] = set()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call; it runs without the GIL and must not raise.

    It must make no arrays, nor call what returns some.
    """
    return _compiled(function, _UNCOUNTED)


def compiled_brief(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` as `compiled` does; it runs with the GIL."""
    return _compiled(function, _UNCOUNTED | {"nogil": False})


def compiled_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Put `function` into the kernels that call it: one less to compile, 0.1 s at the least."""
    return _compiled(function, _UNCOUNTED | {"inline": "always"})


def compiled_to_make(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` as `compiled` does; it may make arrays and return them."""
    return _compiled(function, {})


def _compiled(function: Callable[P, R], more: dict[str, Any]) -> Callable[P, R]:
    kernel: Any
    options: dict[str, Any] = {"nogil": True} | more
    try:
        kernel = numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "cache" not in _warned:
            _warned.add("cache")
            warnings.warn(
                "kernels are compiled anew in this process, because numba cannot keep them on "
                f"disk ({error}); set NUMBA_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=3,
            )
        kernel = numba.njit(**options)(function)
    return kernel  # type: ignore[no-any-return]
