"""Streams from lists, paths and registered names; custom classes; other columns."""

from __future__ import annotations

import json
import pickle
import shutil
from typing import Any

import numpy as np
import pytest
import streaming

from streampack.config import Download, Order, Packing
from streampack.errors import ConfigError
from streampack.loader.loader import PackedDataLoader
from streampack.online.dataset import PackedIterableDataset
from streampack.planned.dataset import PackedStreamingDataset
from streampack.streams import IterableStream, Stream
from streampack.streams.registry import register_stream
from streampack.world import World
from tests.helpers import conformance
from tests.helpers.caches import cached_shards
from tests.helpers.conformance import show

FETCHED: list[str] = []


class Prefixed(streaming.Stream):
    """A user's class with extra arguments, which fetches in its own way."""

    def __init__(self, *, prefix: str = "", **others: Any) -> None:
        super().__init__(**others)
        self.prefix = prefix

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        # The bucket does not exist: only this class knows where the files are.
        FETCHED.append(from_basename)
        source = self.remote.removeprefix("s3://nowhere") + "/" + from_basename
        target = f"{self.local}/{to_basename or from_basename}"
        shutil.copyfile(source, target)
        return target


class Choosy(Stream):
    """A subclass of ours."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    streaming.base.stream.streams_registry.register("prefixed", func=Prefixed)
    streaming.base.stream.streams_registry.register("choosy", func=Prefixed)  # ours comes first
    register_stream("choosy", Choosy)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    rng = np.random.default_rng(7)
    return conformance.write_streams(
        tmp_path_factory.mktemp("streams"), [rng.integers(1, 50, 120).tolist()]
    )


def dataset_of(streams: Any = None, **options: Any) -> PackedStreamingDataset:
    return PackedStreamingDataset(
        streams,
        packing=Packing(max_seq_len=64),
        order=Order(seed=3),
        batch_size=2,
        world=World(),
        **options,
    )


@pytest.mark.parametrize("name", ["streampack", "stream", "choosy", "prefixed"])
def test_a_registered_class_is_found_by_its_name(written, tmp_path, name):
    wanted = [show(batch) for batch in conformance.make(written)]
    scheme = "s3://nowhere" if name == "prefixed" else ""
    dataset = dataset_of(
        stream_name=name,
        stream_config={
            "prefixed": {"prefix": "x"},
            "stream": {"keep_zip": True},
        }.get(name, {"download": Download(keep_zip=True)}),
        remote=f"{scheme}{written.paths[0]}",
        local=str(tmp_path / "cache"),
    )
    assert [show(batch) for batch in dataset] == wanted
    assert cached_shards(tmp_path / "cache")


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_class_that_fetches_in_its_own_way_works_as_an_object(written, tmp_path, num_workers):
    wanted = [show(batch) for batch in conformance.make(written)]
    FETCHED.clear()
    stream = Prefixed(remote=f"s3://nowhere{written.paths[0]}", local=str(tmp_path / "cache"))
    loader = PackedDataLoader(dataset_of([stream]), num_workers=num_workers)
    assert [show(batch) for batch in loader] == wanted
    assert "index.json" in FETCHED


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package that registers a class through an entry point, and a broken one."""
    folder = tmp_path / "site"
    (folder / "weather-1.0.dist-info").mkdir(parents=True)
    (folder / "weather.py").write_text("from streampack import Stream as Rain\n")
    (folder / "weather-1.0.dist-info" / "METADATA").write_text("Name: weather\nVersion: 1.0\n")
    (folder / "weather-1.0.dist-info" / "entry_points.txt").write_text(
        "[streampack.streams]\nrain = weather:Rain\n"
    )
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("installed")
def test_a_class_of_an_installed_package_is_found_by_its_entry_point(written):
    wanted = [show(batch) for batch in conformance.make(written)]
    dataset = dataset_of(stream_name="rain", local=str(written.paths[0]))
    assert [show(batch) for batch in dataset] == wanted
    with pytest.raises(ConfigError, match=r"stream_name='rian' .*choosy\|.*\|rain\|.*'rain'\?"):
        dataset_of(stream_name="rian", local=str(written.paths[0]))


# User classes that override methods that are never called.


class Counting(streaming.Stream):
    """Overrides how shards are prepared."""

    def prepare_shard(self, shard: Any) -> int:
        return int(super().prepare_shard(shard))


class Filtered(streaming.Stream):
    """Skips some shards."""

    def get_shards(self, *args: Any) -> list[Any]:
        return list(super().get_shards(*args))[:1]


class Fetches(Stream):
    """Subclasses our class as if it were MosaicML's."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        raise NotImplementedError


class Inherits(Counting):
    """Inherits an override from its parent."""


class OwnDownloader(type(streaming.base.storage.CloudDownloader.get())):  # type: ignore[misc]
    """A downloader for another kind of store."""


class Speaks(streaming.Stream):
    """Fetches with its own downloader."""

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self._downloader = OwnDownloader()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, "Counting overrides prepare_shard, which streampack never calls"),
        (Filtered, "Filtered overrides get_shards, which streampack never calls"),
        (Inherits, "Inherits overrides prepare_shard, which"),
        (
            Fetches,
            r"Fetches defines _download_file, which streampack never calls on a "
            r"streampack\.Stream; derive the class from streaming\.Stream",
        ),
        (Speaks, "Speaks sets _downloader to a OwnDownloader, which streampack would not use"),
    ],
)
def test_a_class_whose_code_would_be_ignored_is_refused_by_name(written, tmp_path, kind, message):
    stream = kind(remote=str(written.paths[0]), local=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=message):
        dataset_of([stream])


def test_what_a_refused_class_reads_can_be_packed_by_way_of_mosaicml(written, tmp_path):
    stream = Filtered(remote=str(written.paths[0]), local=str(tmp_path / "cache"))
    source = streaming.StreamingDataset(streams=[stream], batch_size=1, shuffle=False)
    packed = PackedIterableDataset([IterableStream(source)], packing=Packing(max_seq_len=64))

    num_samples = {tuple(row) for batch in packed for row in batch["segments"][:, 1:4].tolist()}
    all_samples = json.loads((written.paths[0] / "index.json").read_text())["shards"]
    assert 0 < len(num_samples) == all_samples[0]["samples"] < 120


def test_a_registered_downloader_is_used(written, tmp_path, monkeypatch):
    wanted = [show(batch) for batch in conformance.make(written)]
    monkeypatch.setitem(streaming.base.storage.download.DOWNLOADER_MAPPINGS, "", OwnDownloader)
    stream = Speaks(remote=str(written.paths[0]), local=str(tmp_path / "cache"))
    assert [show(batch) for batch in dataset_of([stream])] == wanted


def test_the_streams_of_a_dataset_are_those_that_were_passed(written):
    streams = written.streams()
    dataset = dataset_of(streams)
    assert all(a is b for a, b in zip(dataset.streams, streams, strict=True))
    assert dataset_of(local=str(written.paths[0])).streams[0].source.local == str(written.paths[0])
    sent = pickle.loads(pickle.dumps(dataset))
    assert [each.source.local for each in sent.streams] == [each.source.local for each in streams]
    rows = IterableStream([[1, 2, 3]], proportion=2.0)
    packed = PackedIterableDataset([rows], packing=Packing(max_seq_len=8))
    assert packed.streams[0].proportion == 2.0
