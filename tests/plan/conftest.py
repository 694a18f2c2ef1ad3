"""Fixtures of the tests of plans."""

from __future__ import annotations

import pytest

from streampack.plan.recipe import Recipe


@pytest.fixture
def small_chunks(monkeypatch):
    """Draw small chunks, so that planning the small streams of tests takes milliseconds."""
    monkeypatch.setattr(Recipe, "chunk", lambda *_: 64)
