"""Relative links in README, CONTRIBUTING and docs/ lead to existing files, headings and tests.

`make docs` only checks the pages of the site; README and CONTRIBUTING are not part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
OUTSIDE = ("http://", "https://", "mailto:")


def prose(page: Path) -> str:
    """Return a page's text without code blocks, in which brackets are not links."""
    return FENCE.sub("", page.read_text())


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings in lower case, words joined by hyphens."""
    found: set[str] = set()
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found | set(re.findall(r'(?:id|name)="([^"]+)"', text))


def broken_links(page: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
        if link.startswith(OUTSIDE):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(prose(target))
        ):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path):
    assert list(broken_links(page)) == []


def test_a_missing_file_and_a_missing_heading_are_found(tmp_path: Path):
    (tmp_path / "b.md").write_text("# One `two`, three\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#one-two-three) [x](b.md#four) [x](c.md) [x](#here)\n\n## Here\n")
    assert list(broken_links(page)) == ["b.md#four", "c.md"]


def test_every_test_that_a_page_names_exists():
    text = "".join(page.read_text() for page in PAGES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    files = set(re.findall(r"`(tests/[\w/.]+)`", text))

    assert len(named) > 100
    assert len(files) > 20
    assert [name for name in named if f"def {name}(" not in tests] == []
    assert [name for name in files if not (ROOT / name).exists()] == []
