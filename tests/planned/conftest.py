"""Streams and datasets of runs of chapters."""

from __future__ import annotations

import pytest

from tests.helpers.datasets import chapter_dataset, write_chapter_streams


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The folders of four streams, by name."""
    return write_chapter_streams(tmp_path_factory.mktemp("streams"))


@pytest.fixture
def make(folders):
    """A function that makes a dataset of chapters over the streams."""
    return lambda chapters, **options: chapter_dataset(folders, chapters, **options)
