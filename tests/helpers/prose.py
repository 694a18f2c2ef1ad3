"""Words and turns of phrase that this project's text does not use, with what to write instead.

``python tests/helpers/prose.py FILE...`` lists each one and fails; the pre-commit hook calls it.
A phrase may run over a line's end, a comment's mark or the quotes of a string in two pieces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TURNS = {
    "anew": "again",
    "nobody|whoever|somebody": "no one, another process, the caller",
    "mend(?:s|ed|ing)?": "fix",
    "likewise|nought|besides|hitherto|thereby": "also, zero, except, before, so",
    "brings?|brought|bringing": "fetch, get, lead to",
    "(?:goes|go|went|going) on": "continue, resume",
    "tells? of|told (?:of|by)|tell those": "report, log",
    "is no (?!longer|more than|doubt|use|need)[a-z]+": "is not a ..., has no ...",
    r"some \d+": "about, and µs for us",
    "at once": "immediately, together",
    "without a word|a word to each other": "silently",
    "(?:returns?|of|from|for|tell|says?) what (?:is|was|are|lies|holds)": "a noun",
    "as good as (?:always|never)|by little": "almost always, just",
    "of one's own": "custom",
    "says (?:how|which|so|what)": "shows, states, a noun",
}
ALLOWED: tuple[str, ...] = ()
"""Exact phrases that are right as they are, in lower case with single spaces."""

GAP = r"[\s#\"]+"
PATTERN = re.compile(
    "|".join(rf"\b(?:{turn.replace(' ', GAP)})\b" for turn in TURNS), re.IGNORECASE
)


def odd_turns(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the phrase of each odd turn in a text."""
    for match in PATTERN.finditer(text):
        phrase = re.sub(GAP, " ", match[0])
        if phrase.lower() not in ALLOWED:
            yield text.count("\n", 0, match.start()) + 1, phrase


def instead(phrase: str) -> str:
    """Return the advice for a phrase that `odd_turns` found."""
    return next(
        advice for turn, advice in TURNS.items() if re.match(rf"{turn}\b", phrase, re.IGNORECASE)
    )


def report(path: Path) -> list[str]:
    """Return one line for each odd turn in a file: place, phrase and advice."""
    text = path.read_text(encoding="utf-8")
    found = odd_turns(text)
    return [f"{path}:{line}: {phrase!r}; write: {instead(phrase)}" for line, phrase in found]


if __name__ == "__main__":
    lines = [line for name in sys.argv[1:] for line in report(Path(name))]
    sys.exit("\n".join(lines) or 0)
