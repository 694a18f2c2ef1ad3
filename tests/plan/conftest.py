"""Fixtures of the tests of plans."""

from __future__ import annotations

import pytest

from streampack.plan import sample_order


@pytest.fixture
def small_chunks(monkeypatch):
    """Draw small chunks, so that planning the small streams of tests takes milliseconds."""
    monkeypatch.setattr(sample_order, "CHUNK", 64)
