"""The project's text keeps to plain English: no phrase of `tests/helpers/prose.py` is left in it.

::

    README, CHANGELOG, ..., docs/, examples/, configs/ --.
    streampack/*.py, streampack/<folder>/ ---------------+--> odd_turns() --> none
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import prose

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streampack"
SUFFIXES = (".md", ".py", ".pyi", ".yaml", ".yml", ".toml")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples")
PAGES += ("configs", ".github")
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def texts(path: Path) -> list[Path]:
    """Return a file itself, or all texts below a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [each for each in files if each.suffix in SUFFIXES]


def reports(files: list[Path]) -> list[str]:
    return [line for path in files for line in prose.report(path)]


@pytest.mark.parametrize("name", PAGES)
def test_no_page_has_an_odd_turn(name):
    files = texts(ROOT / name)

    assert files
    assert reports(files) == []


@pytest.mark.parametrize("folder", ["", *FOLDERS])
def test_no_room_has_an_odd_turn(folder):
    files = texts(PACKAGE / folder) if folder else list(PACKAGE.glob("*.py*"))

    assert files
    assert reports(files) == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("the copy is fetched Anew", "Anew"),
        ("a count that is no integer", "is no integer"),
        ("# read together and at\n    # once", "at once"),
        ('("the seed is no "\n "number")', "is no number"),
        ("it takes some 10 us", "some 10"),
        ("Return what is held.", "Return what is"),
    ],
)
def test_an_odd_turn_is_found_and_has_advice(text, phrase):
    [(line, found)] = prose.odd_turns(text)

    assert (line, found) == (1, phrase)
    assert prose.instead(found)


def test_the_hook_prints_the_place_and_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("One line.\nIt goes on at once.\n")

    done = subprocess.run(
        [sys.executable, prose.__file__, str(page)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"{page}:2: 'goes on'; write: continue, resume",
        f"{page}:2: 'at once'; write: immediately, together",
    ]
