"""Streams and datasets of runs of chapters."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.datasets import chapter_dataset, write_chapter_streams


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of four streams, by name."""
    return write_chapter_streams(tmp_path_factory.mktemp("streams"))


@pytest.fixture
def make(folders: dict[str, str]) -> Any:
    """A function that makes a dataset of chapters over the streams."""
    return lambda chapters, **options: chapter_dataset(folders, chapters, **options)
