"""A cache belongs to one remote, its files are told apart by what they are, not by their names."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import stat
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import streaming
from hypothesis import given
from hypothesis import strategies as st

from streampack import PackedStreamingDataset, Packing
from streampack.errors import ConfigError, DataError
from streampack.mds.length_file import write_length_file
from streampack.storage.cache import ShardCache
from streampack.storage.location import StreamLocation
from streampack.storage.locks import NOTES_FOLDER
from streampack.storage.materialize import Downloader
from streampack.storage.owner import OWNER_FILE
from streampack.streams import Stream, open_stream, open_streams
from streampack.streams import shard_pool as recent_module
from tests.helpers import builders
from tests.helpers.examples import examples

LENGTHS = [1 + (i * 37) % 300 for i in range(40)]


def write(folder: Path, seed: int, **options):
    """Write a stream whose index.json is the same, byte for byte, whatever the seed.

    Its length file is of version 1, as earlier releases wrote it, and holds no hashes of shards.
    """
    with patch("streampack.write.lengths.write_length_file", _without_hashes):
        return builders.write_stream_files(folder, LENGTHS, seed=seed, **options)


def _without_hashes(*arguments) -> None:
    write_length_file(*arguments[:6])


def read_all(opened) -> list[list[int]]:
    tokens = []
    for shard in range(opened.num_shards):
        data = opened.open_shard(shard)
        tokens += [data.tokens.read(data.data, i).tolist() for i in range(len(data.tokens.counts))]
    return tokens


def assert_reads(opened, samples) -> None:
    assert read_all(opened) == [sample.tolist() for sample in samples]


class Buckets:
    """A store whose buckets are folders; counts what it is asked for."""

    def __init__(self, **folders: Path) -> None:
        self.folders = folders
        self.asked: list[str] = []

    def fetch(self, files, basename, to, *, check=None, **_) -> None:
        self.asked.append(basename)
        folder = self.folders[files.remote.partition("://")[2].partition("/")[0]]
        to.write_bytes((folder / basename).read_bytes())
        if check is not None:
            check(to)

    def fetch_if_there(self, files, basename, to) -> bool:
        folder = self.folders[files.remote.partition("://")[2].partition("/")[0]]
        if (folder / basename).is_file():
            self.fetch(files, basename, to)
        return (folder / basename).is_file()

    @property
    def store(self) -> Downloader:
        return Downloader(fetch=self.fetch, fetch_if_there=self.fetch_if_there)


def at_once(function, arguments) -> list:
    """Call a function in as many processes, which begin together; return what they put."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(arguments)), context.SimpleQueue()
    jobs = [context.Process(target=function, args=(*each, barrier, results)) for each in arguments]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * len(jobs)
    return [results.get() for _ in jobs]


# ---------------------------------------------------------------------------- files rewritten


@pytest.mark.parametrize("compression", [None, "gz:0"])
def test_a_local_stream_that_was_rewritten_gives_its_new_tokens(tmp_path, compression):
    path, samples = write(tmp_path / "s", 0, compression=compression)
    index = (path / "index.json").read_bytes()
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)
    shutil.rmtree(path)
    path, others = write(tmp_path / "s", 1, compression=compression)
    assert (path / "index.json").read_bytes() == index
    assert_reads(open_stream(Stream(local=str(path)), 0), others)


def test_a_local_file_that_is_overwritten_where_it_lies_gives_its_new_tokens(tmp_path):
    path, samples = write(tmp_path / "s", 0)
    other, others = write(tmp_path / "other", 1)
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)
    for file in path.glob("*.mds"):
        inode = file.stat().st_ino
        with file.open("r+b") as out:
            out.write((other / file.name).read_bytes())
        assert file.stat().st_ino == inode
    assert_reads(open_stream(Stream(local=str(path)), 0), others)


def test_what_was_unpacked_of_a_rewritten_local_stream_is_unpacked_again(tmp_path):
    stored = {"compression": "gz:0", "lengths_file": False}  # its sizes do not follow the tokens
    path, samples = write(tmp_path / "s", 0, **stored)
    other, others = write(tmp_path / "other", 1, **stored)
    assert (path / "index.json").read_bytes() == (other / "index.json").read_bytes()
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)
    shutil.copytree(other, path, dirs_exist_ok=True)  # the unpacked shards stay beside the new
    assert_reads(open_stream(Stream(local=str(path)), 0), others)


def test_a_local_stream_that_is_rewritten_while_it_is_open_is_refused(tmp_path):
    path, _ = write(tmp_path / "s", 0)
    opened = open_stream(Stream(local=str(path)), 0)
    opened.open_shard(0)
    shutil.rmtree(path)
    _, others = write(tmp_path / "s", 1)
    message = r"shard\.00001\.mds: was changed since .* was opened, .*; make the dataset again"
    with pytest.raises(DataError, match=message):
        opened.open_shard(1)
    with pytest.raises(DataError, match=message.replace("00001", "00000")):
        opened.open_shard(0)
    assert_reads(open_stream(Stream(local=str(path)), 0), others)


def test_hashes_tell_that_a_file_with_another_time_is_the_same(tmp_path):
    path, samples = write(tmp_path / "s", 0, hashes=["xxh64"])
    opened = open_stream(Stream(local=str(path)), 0)
    for file in path.glob("*.mds"):
        os.utime(file, (1, 1))
    assert_reads(opened, samples)


def test_a_remote_folder_that_was_rewritten_is_noticed_in_the_same_process(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0), samples)
    shutil.rmtree(path)
    _, others = write(tmp_path / "r", 1)
    assert_reads(open_stream(stream, 0), others)


def test_a_remote_folder_that_was_rewritten_with_the_old_times_is_noticed(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0), samples)
    times = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    other, others = write(tmp_path / "other", 1)
    for file in other.iterdir():  # as rsync -t and tar do
        os.utime(file, ns=(times[file.name], times[file.name]))
        os.replace(file, path / file.name)
    assert_reads(open_stream(stream, 0), others)


def test_a_remote_folder_that_is_rewritten_while_it_is_open_is_never_mixed(tmp_path):
    path, _ = write(tmp_path / "r", 0)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    opened = open_stream(stream, 0)
    opened.open_shard(0)
    shutil.rmtree(path)
    _, others = write(tmp_path / "r", 1)
    with pytest.raises(DataError, match=r"r/index\.json: was written again since .* was opened"):
        opened.open_shard(1)
    assert_reads(open_stream(stream, 0), others)


def test_lengths_of_a_remote_folder_that_was_rewritten_are_fetched_again(tmp_path):
    path, _ = write(tmp_path / "r", 0, size_limit=None)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    before = open_stream(stream, 0).shard_lengths(0).tolist()
    shutil.rmtree(path)
    builders.write_stream_files(path, LENGTHS[::-1], seed=1, size_limit=None)
    after = open_stream(stream, 0).shard_lengths(0).tolist()
    assert after == before[::-1]


def test_a_cached_file_that_another_of_the_same_time_replaced_is_hashed_again(tmp_path):
    path, samples = write(tmp_path / "r", 0, hashes=["xxh64"])
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0), samples)
    cached = tmp_path / "l" / "shard.00000.mds"
    damaged = bytearray(cached.read_bytes())
    damaged[-1] ^= 1
    time_ns = cached.stat().st_mtime_ns
    (tmp_path / "new").write_bytes(damaged)
    os.utime(tmp_path / "new", ns=(time_ns, time_ns))
    os.replace(tmp_path / "new", cached)
    assert_reads(open_stream(stream, 0), samples)


# ---------------------------------------------------------------------------- the law

SMALL = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PLACES = ("a", "b")  # two remotes, which are also read as local streams
FOLDERS = ("x", "y")
OPENINGS = st.tuples(
    st.just("open"), st.sampled_from(PLACES), st.sampled_from((*FOLDERS, "in place"))
)
STEPS = st.one_of(
    OPENINGS,
    OPENINGS,
    st.tuples(st.just("rewrite"), st.sampled_from(PLACES), st.sampled_from(("new", "over"))),
    st.tuples(st.just("delete"), st.sampled_from(FOLDERS), st.none()),
    st.tuples(st.just("read_on"), st.integers(0, 3), st.integers(0, 2)),
)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[tuple[Path, list]]:
    """Four versions of a stream with one index.json, byte for byte."""
    folder = tmp_path_factory.mktemp("versions")
    return [
        builders.write_stream_files(folder / str(seed), SMALL, seed=seed, size_limit=300)
        for seed in range(4)
    ]


class History:
    """Two places that are rewritten, and what was opened of them at which version."""

    def __init__(self, top: Path, versions: list) -> None:
        self.top, self.versions = top, versions
        self.now = dict(zip(PLACES, (0, 1), strict=True))
        self.used_by: dict[str, str] = {}
        self.kept: list[tuple] = []
        self.times = itertools.count(1)
        for place in PLACES:
            self.put(place)

    def put(self, place: str) -> None:
        folder = self.top / place
        folder.mkdir(exist_ok=True)
        for file in self.versions[self.now[place]][0].iterdir():
            shutil.copyfile(file, folder / file.name)
            os.utime(folder / file.name, ns=(1, next(self.times)))

    def rewrite(self, place: str, how: str) -> None:
        self.now[place] = (self.now[place] + 2) % 4
        if how == "new":
            shutil.rmtree(self.top / place)
        self.put(place)

    def delete(self, folder: str, _: None) -> None:
        shutil.rmtree(self.top / folder, ignore_errors=True)
        self.used_by.pop(folder, None)

    def open(self, place: str, folder: str) -> None:
        if folder == "in place":
            stream = Stream(local=self.top / place)
        else:
            stream = Stream(remote=self.top / place, local=self.top / folder)
            if self.used_by.setdefault(folder, place) != place:
                with pytest.raises(DataError, match="holds files of"):
                    open_stream(stream, 0)
                return
        version = self.now[place]
        opened = open_stream(stream, 0)
        for shard in range(0, opened.num_shards, 2):
            self.check(opened, version, shard)
        self.kept.append((opened, version, place, folder))

    def read_on(self, which: int, shard: int) -> None:
        if self.kept:
            opened, version, place, folder = self.kept[which % len(self.kept)]
            with contextlib.suppress(DataError):
                self.check(opened, version, shard % opened.num_shards)
            if (self.top / folder / NOTES_FOLDER / OWNER_FILE).exists():
                self.used_by.setdefault(folder, place)  # it was deleted, and is used again

    def check(self, opened, version: int, shard: int) -> None:
        first, last = opened.first_sample[shard : shard + 2]
        data = opened.open_shard(shard)
        found = [data.tokens.read(data.data, i).tolist() for i in range(last - first)]
        assert found == [sample.tolist() for sample in self.versions[version][1][first:last]]


FEW = examples(25)
MANY = examples(500)


@pytest.mark.parametrize("how_many", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_stream_gives_the_version_it_was_opened_with_or_an_error(
    tmp_path_factory, versions, how_many
):
    @how_many
    @given(steps=st.lists(STEPS, min_size=3, max_size=12))
    def law(steps):
        top = tmp_path_factory.mktemp("law")
        history = History(top, versions)
        for name, *arguments in steps:
            getattr(history, name)(*arguments)
        shutil.rmtree(top)

    law()


# ---------------------------------------------------------------------------- whose cache it is


def test_a_cache_of_another_remote_is_refused_with_three_ways_out(tmp_path):
    v1, samples = write(tmp_path / "v1", 0)
    v2, others = write(tmp_path / "v2", 1)
    buckets = Buckets(v1=v1, v2=v2)

    def at(bucket: str, local: str = "l"):
        stream = Stream(remote=f"s3://{bucket}/data", local=str(tmp_path / local))
        return open_stream(stream, 0, store=buckets.store)

    assert_reads(at("v1"), samples)
    assert_reads(at("v1"), samples)
    local = tmp_path / "l"
    message = rf"^{local}: holds files of s3://v1/data, but s3://v2/data was requested; set local="
    with pytest.raises(DataError, match=message) as caught:
        at("v2")
    file = local / NOTES_FOLDER / OWNER_FILE
    assert str(file) in str(caught.value)
    assert_reads(at("v1"), samples)

    assert_reads(at("v2", "another"), others)
    shutil.copytree(local, tmp_path / "moved")  # the same files, of a mirror
    (tmp_path / "moved" / NOTES_FOLDER / OWNER_FILE).unlink()
    assert_reads(at("v2", "moved"), samples)
    with pytest.raises(DataError, match="holds files of s3://v2/data, but s3://v1/data"):
        at("v1", "moved")
    shutil.rmtree(local)
    assert_reads(at("v2"), others)


def test_a_remote_that_does_not_exist_claims_nothing(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    local = str(tmp_path / "l")
    with pytest.raises(DataError, match=r"none/index\.json: cannot be fetched"):
        open_stream(Stream(remote=str(tmp_path / "none"), local=local, download_retry=0), 0)
    assert_reads(open_stream(Stream(remote=str(path), local=local), 0), samples)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("s3://b/x", "s3://b/x/", True),
        ("S3://b/x", "s3://b/x", True),
        ("s3://b/x", "s3://b/y", False),
        ("sftp://me:secret@host/x", "sftp://me:newer@host/x", True),
        ("sftp://me@host/x", "sftp://you@host/x", False),
        ("{tmp}/r", "file://{tmp}/r", True),
        ("{tmp}/r", "{tmp}/link", True),
        ("{tmp}/r", "{tmp}/q/../r/", True),
        ("{tmp}/r", "{tmp}/q", False),
        ("gs://x/y", "gs://x/y/", True),
    ],
)
def test_one_remote_may_be_written_in_several_ways(tmp_path, one, other, is_same):
    (tmp_path / "r").mkdir()
    (tmp_path / "q").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "r")

    def owner(remote: str):
        stream = streaming.Stream.__new__(streaming.Stream)
        stream.remote, stream.local, stream.split = remote.format(tmp=tmp_path), "l", ""
        return StreamLocation.of(stream).owner

    for split in ("", "train"):
        assert (owner(one) == owner(other)) is is_same, split
    assert "secret" not in owner(one)


def test_the_split_belongs_to_the_remote(tmp_path):
    _, samples = write(tmp_path / "r" / "train", 0)
    local = str(tmp_path / "l")
    remote = str(tmp_path / "r")
    assert_reads(open_stream(Stream(remote=remote, local=local, split="train"), 0), samples)
    same = Stream(remote=f"{remote}/train", local=f"{local}/train")
    assert_reads(open_stream(same, 0), samples)
    owner = json.loads((tmp_path / "l" / "train" / NOTES_FOLDER / OWNER_FILE).read_text())
    assert owner["remote"] == f"{remote}/train"


def test_a_cache_of_an_earlier_release_or_of_mosaicml_is_adopted(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    other, _ = write(tmp_path / "other", 1)
    local = tmp_path / "l"
    shutil.copytree(path, local)
    assert_reads(open_stream(Stream(remote=str(path), local=str(local)), 0), samples)
    assert (local / NOTES_FOLDER / OWNER_FILE).is_file()
    with pytest.raises(DataError, match="holds files of"):
        open_stream(Stream(remote=str(other), local=str(local)), 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00" * 9, '{"remote": 3}'])
def test_a_torn_note_of_the_owner_is_written_again(tmp_path, text):
    path, samples = write(tmp_path / "r", 0)
    local = tmp_path / "l"
    stream = Stream(remote=str(path), local=str(local))
    assert_reads(open_stream(stream, 0), samples)
    note = local / NOTES_FOLDER / OWNER_FILE
    note.write_text(text)
    assert_reads(open_stream(stream, 0), samples)
    assert json.loads(note.read_text())["remote"] == str(path)


@pytest.mark.parametrize("has_note", [False, True])
def test_a_cache_that_cannot_be_written_is_read_all_the_same(tmp_path, has_note):
    path, samples = write(tmp_path / "r", 0)
    local = tmp_path / "l"
    stream = Stream(remote=str(path), local=str(local))
    assert_reads(open_stream(stream, 0), samples)
    if not has_note:
        (local / NOTES_FOLDER / OWNER_FILE).unlink()

    assert_reads(open_stream(stream, 0, disk=builders.ReadOnlyDisk()), samples)
    assert (local / NOTES_FOLDER / OWNER_FILE).exists() is has_note


def test_a_folder_that_is_its_own_remote_gets_no_owner(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    assert_reads(open_stream(Stream(remote=str(path), local=str(path)), 0), samples)
    os.rename(path, tmp_path / "moved")
    moved = str(tmp_path / "moved")
    assert_reads(open_stream(Stream(remote=moved, local=moved), 0), samples)


def start(remote: str, local: str, barrier, results) -> None:
    barrier.wait()
    try:
        opened = open_stream(Stream(remote=remote, local=local), 0)
        results.put((remote, sum(map(sum, read_all(opened)))))
    except DataError as error:
        results.put((remote, str(error)))


@pytest.mark.processes
def test_of_jobs_that_start_at_once_one_remote_gets_the_folder(tmp_path):
    sums = {}
    for seed, name in enumerate(("a", "b")):
        path, samples = write(tmp_path / name, seed)
        sums[str(path)] = sum(int(sample.sum()) for sample in samples)
    for attempt in range(5):
        local = str(tmp_path / f"l{attempt}")
        outcomes = at_once(start, [(remote, local) for remote in list(sums) * 2])
        winners = {remote for remote, outcome in outcomes if not isinstance(outcome, str)}
        assert len(winners) == 1
        for remote, outcome in outcomes:
            if remote in winners:
                assert outcome == sums[remote]
            else:
                assert "holds files of" in outcome


# ---------------------------------------------------------------------------- one folder twice


def test_two_streams_share_a_folder_only_if_they_are_the_same_stream(tmp_path):
    a, samples = write(tmp_path / "a", 0)
    b, _ = write(tmp_path / "b", 1)
    local = str(tmp_path / "l")
    pair = [Stream(remote=str(a), local=local), Stream(remote=str(b), local=f"{local}/../l/")]
    message = rf"streams 0 and 1 share the local folder {local}, but .*{a}' and .*{b}'; set "
    with pytest.raises(ConfigError, match=message):
        PackedStreamingDataset(pair, packing=Packing(max_seq_len=64))
    assert not (tmp_path / "l").exists()

    with pytest.raises(ConfigError, match="share the local folder"):
        open_streams([pair[0], Stream(local=local)])
    pair[1].local = str(tmp_path / "another")
    PackedStreamingDataset(pair, packing=Packing(max_seq_len=64))
    for opened in open_streams([pair[0], Stream(remote=f"file://{a}", local=local)]):
        assert_reads(opened, samples)


def test_a_local_stream_may_be_given_twice(tmp_path):
    path, samples = write(tmp_path / "s", 0)
    (tmp_path / "link").symlink_to(path)
    streams = [Stream(local=str(path)), Stream(local=str(tmp_path / "link"))]
    for opened in open_streams(streams):
        assert_reads(opened, samples)


# ---------------------------------------------------------------------------- predictable places


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_an_unset_local_is_closed_to_other_users(tmp_path, temporary):
    path, samples = write(tmp_path / "r", 0)
    stream = Stream(remote=str(path))
    assert not list(temporary.iterdir())
    assert_reads(open_stream(stream, 0), samples)
    (root,) = temporary.iterdir()
    assert folder_of(stream).is_relative_to(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert folder_of(Stream(remote=f"file://{path}", split="")) == folder_of(stream)


def folder_of(stream: Stream) -> Path:
    return StreamLocation.of(stream).folder


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def poisoned(folder: Path, tmp_path) -> None:
    """Make a stream's folder as another user would, with a stream of theirs in it."""
    theirs, _ = write(tmp_path / "theirs", 1)
    shutil.copytree(theirs, folder)
    top = Path(tempfile.gettempdir())
    for folder in top.iterdir():
        for each in (folder, *folder.rglob("*")):
            os.chown(each, 65534, 65534)
            if each.is_dir():
                each.chmod(0o777)


@needs_root
def test_a_folder_that_another_user_made_first_is_not_used(tmp_path, temporary):
    path, samples = write(tmp_path / "r", 0)
    stream = Stream(remote=str(path))
    taken = StreamLocation.of(stream)
    poisoned(taken.folder, tmp_path)
    assert folder_of(stream) == folder_of(Stream(remote=str(path))) != taken.folder
    assert_reads(open_stream(stream, 0), samples)
    root = temporary / folder_of(stream).relative_to(temporary).parts[0]
    assert stat.S_IMODE(root.stat().st_mode) == 0o700

    # What was chosen before the other user came is refused, by name.
    message = r"belongs to another user.*set local="
    with pytest.raises(DataError, match=message):
        _ = ShardCache(taken).metadata.index_bytes()


@needs_root
@pytest.mark.usefixtures("temporary")
def test_a_folder_that_mosaicml_chose_is_refused_if_another_user_made_it(tmp_path, monkeypatch):
    path, samples = write(tmp_path / "r", 0)
    theirs = streaming.Stream(remote=str(path), split="")
    assert_reads(open_stream(theirs, 0), samples)
    root = Path(theirs.local)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    shutil.rmtree(root)
    poisoned(root, tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")  # which does not look whether it is there
    with pytest.raises(DataError, match=rf"{root}.*belongs to another user.*set local="):
        open_stream(streaming.Stream(remote=str(path)), 0)
    named = streaming.Stream(remote=str(path), local=str(tmp_path / "named"))
    assert_reads(open_stream(named, 0), samples)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_the_scratch_folder_of_another_user_is_not_used(tmp_path, temporary, kind):
    path, samples = write(tmp_path / "s", 0, compression="zstd")
    (path / NOTES_FOLDER).write_text("")  # so that nothing can be written there
    root = temporary / f"streampack-{os.getuid()}"
    if kind == "folder":
        root.mkdir(mode=0o777)
        os.chown(root, 65534, 65534)
    else:
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)
    assert not list(root.rglob("*"))
    (own,) = [each for each in temporary.iterdir() if each != root]
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@needs_root
def test_a_user_whose_every_folder_is_taken_is_told_what_to_set(tmp_path, temporary):
    path, samples = write(tmp_path / "r", 0)
    for number in range(100):
        folder = temporary / (f"streampack-{os.getuid()}" + (f"-{number}" if number else ""))
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match=r"local=None: .* other users.*; set local= or TMPDIR"):
        open_stream(Stream(remote=str(path)), 0)
    named = Stream(remote=str(path), local=str(tmp_path / "l"))
    assert_reads(open_stream(named, 0), samples)
    packed, _ = write(tmp_path / "s", 0, compression="zstd")
    (packed / NOTES_FOLDER).write_text("")
    opened = open_stream(Stream(local=str(packed)), 0)
    with pytest.raises(DataError, match=r"cannot be written \(.* belong to other users"):
        opened.open_shard(0)


def test_a_folder_that_a_class_chose_for_itself_keeps_its_mode(tmp_path, temporary):
    path, samples = write(tmp_path / "r", 0)
    theirs = streaming.Stream(remote=str(path))
    theirs.local = str(temporary / "shared" / "cache")
    (temporary / "shared").mkdir(mode=0o755)
    assert_reads(open_stream(theirs, 0), samples)
    assert stat.S_IMODE((temporary / "shared").stat().st_mode) == 0o755


def test_a_folder_of_ours_that_others_could_write_is_closed(tmp_path, temporary):
    root = temporary / f"streampack-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    path, samples = write(tmp_path / "r", 0)
    assert_reads(open_stream(Stream(remote=str(path)), 0), samples)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


# ---------------------------------------------------------------------------- damaged files of ours


@pytest.fixture
def new_process(monkeypatch):
    """Forget what this process has open, as a new one would not know it."""
    return lambda: monkeypatch.setattr(recent_module, "_pools", {})


def flip_offset(file: Path, sample: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[4 + 4 * sample + 1] ^= 0x40
    time_ns = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(time_ns, time_ns))  # as rot does


@pytest.mark.parametrize("keep_zip", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_cached_shard_with_damaged_offsets_is_fetched_once_more(
    tmp_path, compression, keep_zip, new_process
):
    path, samples = write(tmp_path / "r", 0, compression=compression)
    buckets = Buckets(b=path)
    stream = Stream(remote="s3://b/r", local=str(tmp_path / "l"), keep_zip=keep_zip)
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    flip_offset(tmp_path / "l" / "shard.00000.mds")
    buckets.asked.clear()
    for _ in range(2):
        new_process()
        assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    assert len(buckets.asked) == 1


def test_a_shard_that_is_damaged_at_its_origin_is_fetched_twice_and_named(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    whole = (path / "shard.00000.mds").read_bytes()
    flip_offset(path / "shard.00000.mds")
    buckets = Buckets(b=path)
    stream = Stream(remote="s3://b/r", local=str(tmp_path / "l"))
    opened = open_stream(stream, 0, store=buckets.store)
    buckets.asked.clear()
    message = r"s3://b/r/shard\.00000\.mds.*fetched again.* damaged at its origin: write it again"
    with pytest.raises(DataError, match=message):
        opened.open_shard(0)
    assert buckets.asked == ["shard.00000.mds"] * 2
    # Once the origin is fixed, the next start needs nothing by hand.
    (path / "shard.00000.mds").write_bytes(whole)
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)


def test_a_damaged_shard_that_is_not_ours_is_never_touched(tmp_path):
    path, _ = write(tmp_path / "r", 0)
    shutil.copytree(path, tmp_path / "l")
    theirs = tmp_path / "l" / "shard.00000.mds"
    flip_offset(theirs)
    content = theirs.read_bytes()
    for stream in (
        Stream(remote=str(path), local=str(tmp_path / "l")),
        Stream(local=str(tmp_path / "l")),
    ):
        with pytest.raises(DataError, match="the shard is damaged: if it is a cached copy, delete"):
            open_stream(stream, 0).open_shard(0)
        assert theirs.read_bytes() == content


def test_a_damaged_unpacked_shard_of_a_local_stream_is_unpacked_again(tmp_path, new_process):
    path, samples = write(tmp_path / "s", 0, compression="zstd")
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)
    flip_offset(path / "shard.00000.mds")
    new_process()
    assert_reads(open_stream(Stream(local=str(path)), 0), samples)


def open_all(remote: str, local: str, barrier, results) -> None:
    opened = open_stream(Stream(remote=remote, local=local), 0)
    barrier.wait()
    results.put(sum(map(sum, read_all(opened))))


@pytest.mark.processes
def test_processes_that_find_one_damaged_shard_all_go_on(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    local = tmp_path / "l"
    assert_reads(open_stream(Stream(remote=str(path), local=str(local)), 0), samples)
    for file in local.glob("*.mds"):
        flip_offset(file)
    sums = at_once(open_all, [(str(path), str(local))] * 3)
    assert sums == [sum(int(sample.sum()) for sample in samples)] * 3


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flip_head(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)


def flip_length(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-8 * len(LENGTHS) - 4] ^= 1  # the last sample's length; edges are behind
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip_head, flip_length])
def test_a_damaged_length_file_of_ours_is_fetched_again(tmp_path, damage):
    path, samples = write(tmp_path / "r", 0)
    stream = Stream(remote=str(path), local=str(tmp_path / "l"))
    before = open_stream(stream, 0)
    damage(tmp_path / "l" / "lengths.bin")
    opened = open_stream(stream, 0)
    for shard in range(opened.num_shards):
        lengths = opened.shard_lengths(shard)
        first = int(opened.first_sample[shard])
        np.testing.assert_array_equal(lengths, LENGTHS[first : first + len(lengths)])
    assert (tmp_path / "l" / "lengths.bin").read_bytes() == (path / "lengths.bin").read_bytes()
    assert_reads(before, samples)


def test_a_length_file_that_is_damaged_at_its_origin_is_fetched_once_more_and_refused(tmp_path):
    path, _ = write(tmp_path / "r", 0)
    cut(path / "lengths.bin")
    buckets = Buckets(b=path)
    stream = Stream(remote="s3://b/r", local=str(tmp_path / "l"))
    with pytest.raises(DataError, match=r"lengths\.bin: has \d+ bytes, but should have"):
        open_stream(stream, 0, store=buckets.store)
    assert buckets.asked.count("lengths.bin") == 2


@pytest.mark.parametrize("damage", [cut, flip_head])
def test_a_damaged_index_of_ours_is_fetched_again(tmp_path, damage, caplog):
    path, samples = write(tmp_path / "r", 0)
    buckets = Buckets(b=path)
    stream = Stream(remote="s3://b/r", local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    damage(tmp_path / "l" / "index.json")
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    assert "is not what was fetched" in caplog.text
    assert (tmp_path / "l" / "index.json").read_bytes() == (path / "index.json").read_bytes()


def test_a_fetched_index_of_another_version_never_joins_shards_without_hashes(tmp_path):
    path, samples = write(tmp_path / "r", 0)
    buckets = Buckets(b=path)
    stream = Stream(remote="s3://b/r", local=str(tmp_path / "l"))
    assert_reads(open_stream(stream, 0, store=buckets.store), samples)
    shutil.rmtree(path)
    _, others = builders.write_stream_files(path, LENGTHS[:-1], seed=1)
    (tmp_path / "l" / "index.json").unlink()
    with pytest.raises(DataError, match=r"l: was fetched from another version of s3://b/r: .* del"):
        open_stream(stream, 0, store=buckets.store)
    shutil.rmtree(tmp_path / "l")
    assert_reads(open_stream(stream, 0, store=buckets.store), others)
