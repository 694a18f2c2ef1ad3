"""The project's text keeps to plain English: no phrase of `tests/helpers/prose.py` is left in it.

::

    README, CHANGELOG, ..., docs/, examples/, configs/ --.
    streampack/*.py, streampack/<folder>/ ---------------+--> odd_turns() --> none
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import prose

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "streampack"
PAGE = ROOT / "docs/ARCHITECTURE.md"
SUFFIXES = (".md", ".py", ".pyi", ".yaml", ".yml", ".toml")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "docs")
PAGES += ("examples", "configs", ".github", "benchmarks", "scripts", "tests")
LISTS = ("prose.py", "test_words.py")  # which have these words to compare with
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def texts(path: Path) -> list[Path]:
    """Return a file itself, or all texts below a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [each for each in files if each.suffix in SUFFIXES]


def reports(files: list[Path]) -> list[str]:
    return [line for path in files if path.name not in LISTS for line in prose.report(path)]


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


# The table of words.


def words() -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield each word that few folders may use, these folders, and the names allowed anywhere."""
    section = PAGE.read_text().split("## Words")[1].split("## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].isalpha() and cells[0] != "word" and cells[2]:
            rooms, _, rest = cells[2].partition(";")
            yield cells[0], set(rooms.split(", ")), set(re.findall("`([^`]+)`", rest))


def parts(name: str) -> list[str]:
    """Return the words of an identifier in lower case, without plural endings and the like."""
    found = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return [re.sub("(?<=[a-z]{3})(es|(?<!s)s|ed|n?ing)$", "", part.lower()) for part in found]


@cache
def names_in(path: Path) -> dict[str, list[str]]:
    """Return the identifiers of a file, with their words; `pass` is also a statement."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} - {"pass"}
    return {name: parts(name) for name in names}


def strangers(path: Path, word: str, allowed: set[str]) -> list[str]:
    """Return the identifiers of a file that contain a word."""
    stem = parts(word)[0]
    return sorted(
        name for name, own in names_in(path).items() if stem in own and name not in allowed
    )


@pytest.mark.parametrize(("word", "rooms", "allowed"), list(words()))
def test_a_word_is_in_the_names_of_its_folders_only(word, rooms, allowed):
    found = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in rooms and (names := strangers(path, word, allowed)):
            found[str(path.relative_to(PACKAGE))] = names

    assert found == {}, f"{word!r} has another meaning; see the table of words in {PAGE.name}"
