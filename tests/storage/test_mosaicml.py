"""MosaicML's classes in streampack: their downloaders and streams, and processes without them."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming

from streampack import (
    Download,
    Order,
    PackedDataLoader,
    PackedStreamingDataset,
    Packing,
    Stream,
    World,
)
from tests.helpers import conformance
from tests.helpers.conformance import Written, show
from tests.helpers.locations import location_of

INSTALL_PAGE = Path(__file__).parents[2] / "docs/install.md"


def said_by(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    lengths = np.random.default_rng(7).integers(1, 50, 120).tolist()
    return conformance.write_streams(tmp_path_factory.mktemp("streams"), [lengths])


def test_the_install_page_names_the_versions_of_the_constraints():
    constraints = (INSTALL_PAGE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    pins = [line for line in constraints.split() if line.startswith(("torch==", "torchvision=="))]

    assert len(pins) == 2
    assert f"pip install {' '.join(pins)} " in INSTALL_PAGE.read_text(encoding="utf-8")


@pytest.mark.processes
def test_without_mosaicmls_package_what_needs_it_names_the_extra(written):
    printed = said_by(
        f"""
import sys
sys.modules["streaming"] = None  # as if it were not installed
from streampack import ConfigError, PackedStreamingDataset, Packing
for options in (
    {{"remote": "oci://bucket/books"}},
    {{"stream_name": "stream", "local": {str(written.paths[0])!r}}},
    {{"stream_name": "streampack", "local": {str(written.paths[0])!r}}},
):
    try:
        dataset = PackedStreamingDataset(**options, packing=Packing(max_seq_len=64))
        print(len(next(iter(dataset))["tokens"]))
    except ConfigError as error:
        print(error)
"""
    )
    store, name, ours = printed.splitlines()
    assert store.startswith("remote='oci://bucket/books' needs streaming (")
    assert store.endswith("; pip install 'streampack[mosaicml]'")
    assert name.startswith("stream_name='stream' is not one of streampack")
    assert name.endswith("MosaicML's classes need pip install 'streampack[mosaicml]'")
    assert ours == "1"


class Shelf(streaming.base.storage.CloudDownloader):  # type: ignore[misc]
    """A downloader that uses a local folder as its bucket."""

    num_open = 0

    def __init__(self) -> None:
        Shelf.num_open += 1

    @staticmethod
    def _client_identifier() -> str:
        return "oci"

    def clean_up(self) -> None:
        """Count the downloader as closed."""
        Shelf.num_open -= 1

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        assert timeout == 7
        shutil.copyfile(remote.removeprefix("oci://shelf"), local)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", [Stream, streaming.Stream], ids=["ours", "theirs"])
def test_their_downloaders_serve_the_stores_that_nothing_else_does(
    written, tmp_path, monkeypatch, make, num_workers
):
    monkeypatch.setitem(streaming.base.storage.download.DOWNLOADER_MAPPINGS, "oci", Shelf)
    remote = f"oci://shelf{written.paths[0].parent}"
    timeout = {"download": Download(timeout=7)} if make is Stream else {"download_timeout": 7}
    stream = make(remote=remote, split="s0", local=str(tmp_path / "cache"), **timeout)
    already_open = Shelf.num_open
    dataset = PackedStreamingDataset(
        [stream], packing=Packing(max_seq_len=64), order=Order(seed=3), batch_size=2, world=World()
    )

    assert [show(batch) for batch in PackedDataLoader(dataset, num_workers=num_workers)] == [
        show(batch) for batch in conformance.make(written)
    ]
    assert list((tmp_path / "cache").rglob("*.mds*"))
    assert Shelf.num_open == already_open


class Told(streaming.Stream):  # type: ignore[misc]
    """Fetches with MosaicML's client, and records each call."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.notes = f"{self.local}-notes"

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        path: str = super()._download_file(from_basename, to_basename)
        with open(self.notes, "a", encoding="utf-8") as notes:
            notes.write(f"{from_basename} {self.download_retry} {self.download_timeout}\n")
        return path


def test_a_download_of_a_class_of_its_own_is_sent_to_workers_without_its_client(written, tmp_path):
    stream = Told(remote=str(written.paths[0]), local=str(tmp_path / "cache"))
    stream._downloader.lock = (line for line in "")  # like a client, it cannot be pickled
    location = pickle.loads(pickle.dumps(location_of(stream)))

    location.own_download("index.json", tmp_path / "cache" / "x.tmp")

    original = written.paths[0] / "index.json"
    assert (tmp_path / "cache" / "x.tmp").read_bytes() == original.read_bytes()
    assert Path(stream.notes).read_text() == "index.json 1 60.0\n"
    assert "download_retry" not in vars(stream)


def test_a_plain_stream_of_theirs_is_fetched_as_ours_is(written, tmp_path):
    for make in (Stream, streaming.Stream):
        stream = make(remote=str(written.paths[0]), local=str(tmp_path / "cache"))
        assert location_of(stream).own_download is None
