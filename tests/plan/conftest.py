"""Fixtures of the tests of plans."""

from __future__ import annotations

import pytest

from streampack.plan.recipe import Recipe


@pytest.fixture
def small_chunks(monkeypatch):
    """Draw small chunks, so that planning the small streams of tests takes milliseconds."""
    sizes = Recipe._sizes
    monkeypatch.setattr(Recipe, "_sizes", lambda *place: sizes(*place)._replace(chunk=64))
