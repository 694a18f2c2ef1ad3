"""One decorator for the integer kernels: numba, without the GIL, cached on disk where it can be.

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

__all__ = ["compiled"]

P = ParamSpec("P")
R = TypeVar("R")

_warned: set[str] = set()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call; it runs without the GIL and must not raise."""
    kernel: Any
    try:
        kernel = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "cache" not in _warned:
            _warned.add("cache")
            warnings.warn(
                "kernels are compiled anew in this process, because numba cannot keep them on "
                f"disk ({error}); set NUMBA_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
        kernel = numba.njit(nogil=True)(function)
    return kernel  # type: ignore[no-any-return]
