"""Decorators for the integer kernels: numba, with a disk cache where possible.

::

    compiled              a kernel that works only on arrays passed in; releases the GIL
    compiled_inline       a helper that is inlined into every kernel that calls it
    kernel_holding_gil    a kernel called from Python that takes a few us; keeps the GIL
    kernel_allocating     a kernel that allocates arrays, or gets arrays from one that does

A thread that releases the GIL may have to wait for another thread to get it back. That wait is tens
of us, so releasing it pays off only for kernels that run for hundreds of us.

`compiled` turns numba's counting of references off: see docs/adr/0015.

After an install, the first batch waits about 6 s for compilation. Assigning one array slice to
another would add 4 s, because its error message formats the shapes. Later processes load machine
code, 3 ms a kernel. They skip what numba does before it looks into its cache, which takes 0.3 s:
importing its whole compiler, and the plug-ins of other packages.

numba has no cache if the module's folder, the user's cache folder and NUMBA_CACHE_DIR are all
read-only. Kernels are then compiled in memory, which takes seconds in every process. A full disk
has the same effect, with one warning. Each cache file carries a digest, since numba would run
whatever machine code a corrupt file has. Files that fail the check are discarded.

The cache notices changes to a kernel's own file, but not to files with kernels that it calls. Keep
kernels that call each other in one file.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.options import DefaultOptions
from numba.core.runtime.nrt import rtsys

from streampack.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

# `_nrt` is private to numba: it is the runtime that counts. Without the option kernels are slower.
_UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

# The last two save a tenth of the time to compile: no kernel is called from C or divides by zero.
_COMMON = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}

_warned: set[str] = set()


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call. It runs without the GIL and must not raise.

    It must not allocate arrays, or call functions that return arrays.
    """
    return _compiled(function, _UNCOUNTED)


def kernel_holding_gil(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` as `compiled` does, but keep the GIL."""
    return _compiled(function, _UNCOUNTED | {"nogil": False})


def compiled_inline(function: Callable[P, R]) -> Callable[P, R]:
    """Inline `function` into the kernels that call it. Saves at least 0.1 s of compilation."""
    return _compiled(function, _UNCOUNTED | {"inline": "always"})


def kernel_allocating(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` as `compiled` does, but let it allocate and return arrays."""
    return _compiled(function, {})


def _compiled(function: Callable[P, R], more: dict[str, Any]) -> Callable[P, R]:
    if numba.config.DISABLE_JIT:
        raise ConfigError(
            "NUMBA_DISABLE_JIT=1 is set, but without compiled kernels a batch would take minutes; "
            "unset it"
        )
    options: dict[str, Any] = _COMMON | more
    kernel: Any = numba.njit(**options)(function)
    # numba would load its plug-ins here. A compilation does so in any case.
    kernel._compilation_chain_init_hook = lambda: None
    try:
        kernel._cache = _KernelCache(function, allocates="_nrt" not in options)
    except RuntimeError as error:
        _warn_uncached(error)
    return kernel  # type: ignore[no-any-return]


def _warn_uncached(error: Exception) -> None:
    _warn_once(
        "kernels are compiled again in this process, because numba cannot keep them on disk "
        f"({error}); set NUMBA_CACHE_DIR to a folder that is writable and has free space"
    )


def _check_directory(cache: str) -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{cache} lacks a kernel, and numba cannot compile it, because the working directory "
            "of this process was deleted; change to a folder that exists"
        ) from error


def _warn_once(text: str) -> None:
    kind = text[:40]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


class _CacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """The cache files of one kernel. A data file is loaded only if its digest matches."""

    def _digest(self, data: bytes) -> bytes:
        # Keyed by the source's stamp: numba reuses the file names of older sources.
        return blake2b(data, digest_size=32, key=repr(self._source_stamp).encode()[:64]).digest()

    def _dump(self, obj: Any) -> bytes:
        data: bytes = super()._dump(obj)
        return data + self._digest(data)  # pickle stops at its own end marker

    def _load_data(self, name: str) -> Any:
        with open(self._data_path(name), "rb") as file:
            content = file.read()
        data, digest = content[:-32], content[-32:]
        if self._digest(data) != digest:
            raise ValueError(f"{name} is torn")
        return pickle.loads(data)

    def remove(self) -> None:
        """Invalidate the cache: without an index, no data file is loaded."""
        with suppress(OSError):
            os.unlink(self._index_path)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """numba's cache of one kernel. A failure costs a compilation and is not an error."""

    _cache_file: Any

    def __init__(self, function: Callable[..., Any], *, allocates: bool) -> None:
        super().__init__(function)
        self._allocates = allocates
        plain: Any = self._cache_file
        base = plain._index_name.removesuffix(".nbi")
        self._cache_file = _CacheFile(plain._cache_path, base, plain._source_stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the cached kernel, or None. If it cannot be loaded, delete the index.

        numba's own method first prepares for a compilation. Machine code needs none of that, but if
        it allocates arrays, it needs numba's runtime.
        """
        found = None
        try:
            if self._allocates:
                rtsys.initialize(target_context)
            found = self._load_overload(sig, target_context)
        except OSError as error:
            _warn_uncached(error)
        except Exception as error:  # a corrupt pickle may raise nearly anything
            self._cache_file.remove()
            _warn_once(
                f"discarded a cached kernel in {self._cache_path} that cannot be loaded "
                f"({type(error).__name__}: {error}); it is compiled again"
            )
        if found is None:
            _check_directory(self._cache_path)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a kernel, or warn if that fails."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            # The index was written first, and may point to a data file of an older source.
            self._cache_file.remove()
            _warn_uncached(error)
