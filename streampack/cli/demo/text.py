"""Real text without a network: texts that every Python installation contains.

::

    code         the standard library's source files           long        PSF-2.0
    manuals      pydoc's topics, the packages' descriptions    medium      PSF-2.0, theirs
    docstrings   the standard library's docstrings             short       PSF-2.0

No text is stored in the repository, so the result depends slightly on the machine.

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

# Tables and texts in many languages: many bytes with little to learn from.
LEFT_OUT = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
MIN_CHARACTERS = 100  # one-liners are left out


def _library_files() -> Iterator[Path]:
    """Yield the paths of the standard library's source files, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(root).parts):
            yield path


def code() -> Iterator[str]:
    """Yield the standard library's source files, without those of a line or two."""
    for path in _library_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= MIN_CHARACTERS:
            yield text


def manuals() -> Iterator[str]:
    """Yield the topics of ``help()``, then the descriptions of the installed packages."""
    yield from (topics[name] for name in sorted(topics))
    # A package may be found twice, in a virtual environment and in its base installation.
    descriptions = {
        str(package.metadata["Name"]): str(package.metadata.json.get("description", ""))
        for package in distributions()
    }
    for name in sorted(descriptions):
        if len(descriptions[name]) >= MIN_CHARACTERS:
            yield descriptions[name]


def docstrings() -> Iterator[str]:
    """Yield the distinct docstrings of the standard library."""
    seen = set()
    for text in code():
        for docstring in _docstrings_in(text):
            if docstring not in seen and len(docstring) >= MIN_CHARACTERS:
                seen.add(docstring)
                yield docstring


def _docstrings_in(text: str) -> Iterator[str]:
    """Yield the docstrings of one source file."""
    with warnings.catch_warnings():
        # Old modules contain escape sequences that newer Pythons warn about.
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
