"""Objects of a store, each in one version."""

from __future__ import annotations

from typing import NamedTuple


class Found(NamedTuple):
    """An object that was found."""

    url: str
    version: str
    """Its tag, as "etag:...", or what the store has instead, as "size:...,mtime_ns:..."."""
    num_bytes: int
    """Its size; -1 if the store does not say it."""


class Page(NamedTuple):
    """A part of a listing."""

    found: list[Found]
    after: str | None
    """Where the next page begins; None after the last."""


def version_of_tag(tag: str) -> str:
    """Return the version of an object that its store has tagged.

    >>> version_of_tag('"900150983cd24fb0"')
    'etag:900150983cd24fb0'
    """
    return f"etag:{tag.strip(chr(34))}"
