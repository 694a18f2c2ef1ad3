"""Real text without a network: what every Python installation has on its disk.

::

    code         the standard library's source files           long        PSF-2.0
    manuals      pydoc's topics, the packages' descriptions    middling    PSF-2.0, theirs
    docstrings   the standard library's docstrings             short       PSF-2.0

Nothing is kept in the repository, so what comes out depends a little on the machine.

Cost: about four seconds on one core, most of it Python parsing its own library.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["SOURCES"]

# Files in many languages or full of tables: little to learn from, and a large part of the bytes.
LEFT_OUT = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
MIN_CHARACTERS = 100  # a one-liner teaches nothing


def _library_files() -> Iterator[Path]:
    """The standard library's source files, always in the same order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(root).parts):
            yield path


def code() -> Iterator[str]:
    """The standard library's source files, those of a line or two left out."""
    for path in _library_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= MIN_CHARACTERS:
            yield text


def manuals() -> Iterator[str]:
    """The chapters behind ``help()``, then the descriptions of the installed packages."""
    yield from (topics[name] for name in sorted(topics))
    # A package can be found twice, in a virtual environment and below it.
    descriptions = {
        str(package.metadata["Name"]): str(package.metadata.json.get("description", ""))
        for package in distributions()
    }
    for name in sorted(descriptions):
        if len(descriptions[name]) >= MIN_CHARACTERS:
            yield descriptions[name]


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library, each once."""
    seen = set()
    for text in code():
        for docstring in _docstrings_in(text):
            if docstring not in seen and len(docstring) >= MIN_CHARACTERS:
                seen.add(docstring)
                yield docstring


def _docstrings_in(text: str) -> Iterator[str]:
    """The docstrings of one source file, in its order."""
    with warnings.catch_warnings():
        # Old modules hold escapes that newer Pythons warn of.
        warnings.simplefilter("ignore")
        module = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(module):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "code": code,
    "manuals": manuals,
    "docstrings": docstrings,
}
