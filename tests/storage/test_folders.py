"""Predictable folders are private; folders, pipes and devices in place of files are refused."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import streaming

from streampack import PackedStreamingDataset, Packing
from streampack.errors import ConfigError, DataError
from streampack.index import write_lengths
from streampack.mds.index import INDEX_FILE
from streampack.mds.length_file import LENGTH_FILE
from streampack.storage.cache import ShardCache
from streampack.streams import Stream, open_stream
from tests.helpers.builders import write_stream_files
from tests.helpers.caches import NOTES, assert_reads, write_bare
from tests.helpers.locations import location_of


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_an_unset_local_is_closed_to_other_users(tmp_path, temporary):
    path, samples = write_bare(tmp_path / "r", seed=0)
    stream = Stream(remote=str(path))
    assert not list(temporary.iterdir())
    assert_reads(open_stream(stream, 0), samples)
    (root,) = temporary.iterdir()
    assert folder_of(stream).is_relative_to(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert folder_of(Stream(remote=f"file://{path}", split="")) == folder_of(stream)


def folder_of(stream: Stream) -> Path:
    return location_of(stream).folder


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def poisoned(folder: Path, tmp_path) -> None:
    """Create a stream's folder as another user would, with their stream in it."""
    theirs, _ = write_bare(tmp_path / "theirs", seed=1)
    shutil.copytree(theirs, folder)
    top = Path(tempfile.gettempdir())
    for folder in top.iterdir():
        for each in (folder, *folder.rglob("*")):
            os.chown(each, 65534, 65534)
            if each.is_dir():
                each.chmod(0o777)


@needs_root
@pytest.mark.usefixtures("temporary")
def test_a_folder_that_another_user_made_first_is_not_used(tmp_path):
    path, samples = write_bare(tmp_path / "r", seed=0)
    stream = Stream(remote=str(path))
    taken = location_of(stream)
    poisoned(taken.folder, tmp_path)
    with pytest.raises(ConfigError, match=r"belongs to another user.*; set local= or TMPDIR"):
        location_of(stream)
    assert_reads(open_stream(Stream(remote=str(path), local=str(tmp_path / "l")), 0), samples)

    # A folder that was chosen before the other user came is refused by name.
    message = r"belongs to another user.*set local="
    with pytest.raises(DataError, match=message):
        ShardCache(taken).metadata.index_bytes()


@needs_root
@pytest.mark.usefixtures("temporary")
def test_a_folder_that_mosaicml_chose_is_refused_if_another_user_made_it(tmp_path, monkeypatch):
    path, samples = write_bare(tmp_path / "r", seed=0)
    theirs = streaming.Stream(remote=str(path), split="")
    assert_reads(open_stream(theirs, 0), samples)
    root = Path(theirs.local)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    shutil.rmtree(root)
    poisoned(root, tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")  # this rank does not check that it exists
    with pytest.raises(DataError, match=rf"{root}.*belongs to another user.*set local="):
        open_stream(streaming.Stream(remote=str(path)), 0)
    named = streaming.Stream(remote=str(path), local=str(tmp_path / "named"))
    assert_reads(open_stream(named, 0), samples)


def test_shards_that_cannot_be_unpacked_in_place_are_refused_with_a_way_out_that_works(tmp_path):
    path, samples = write_bare(tmp_path / "s", seed=0, compression="zstd")
    (path / NOTES).write_text("")  # so that nothing can be written there
    opened = open_stream(Stream(local=str(path)), 0)
    with pytest.raises(DataError, match=rf"cannot be written.*set remote='{path}' and local= to"):
        opened.fetch(0)
    assert_reads(open_stream(Stream(remote=str(path), local=str(tmp_path / "l")), 0), samples)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_the_temporary_folder_of_another_user_is_not_used(tmp_path, temporary, kind):
    path, samples = write_bare(tmp_path / "s", seed=0)
    root = temporary / f"streampack-{os.getuid()}"
    if kind == "folder":
        root.mkdir(mode=0o777)
        os.chown(root, 65534, 65534)
    else:
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"belongs to another user, .*; set local= or TMPDIR"):
        open_stream(Stream(remote=str(path)), 0)
    assert not list(root.rglob("*"))
    assert_reads(open_stream(Stream(remote=str(path), local=str(tmp_path / "l")), 0), samples)


def test_a_folder_of_ours_that_others_could_write_is_closed(tmp_path, temporary):
    root = temporary / f"streampack-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    path, samples = write_bare(tmp_path / "r", seed=0)
    assert_reads(open_stream(Stream(remote=str(path)), 0), samples)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


PUT: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


def open_dataset(**location: str) -> PackedStreamingDataset:
    return PackedStreamingDataset([Stream(**location)], packing=Packing(max_seq_len=64))


WAYS: dict[str, Callable[[Path], object]] = {
    "local": lambda folder: open_dataset(local=str(folder)),
    "remote": lambda folder: open_dataset(remote=str(folder), local=f"{folder}-cache"),
    "index": write_lengths,
}


@pytest.fixture
def folder(tmp_path):
    return write_stream_files(tmp_path / "stream", [5, 7, 9])[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PUT)
@pytest.mark.parametrize("name", [INDEX_FILE, LENGTH_FILE])
def test_folders_pipes_and_devices_are_refused_by_kind_and_the_way_out_works(
    folder, name, kind, way
):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    PUT[kind](folder / name)
    with pytest.raises(DataError, match=rf"{name}: is a {kind}, not a file; remove it, or put"):
        WAYS[way](folder)

    os.rmdir(folder / name) if kind == "folder" else os.unlink(folder / name)
    (folder / name).write_bytes(content)
    WAYS[way](folder)


def test_a_pipe_in_place_of_a_shard_of_a_remote_folder_is_refused(folder, tmp_path):
    [shard] = folder.glob("shard*")
    shard.unlink()
    os.mkfifo(shard)
    dataset = open_dataset(remote=str(folder), local=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="is a pipe, not a file"):
        next(iter(dataset))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", [INDEX_FILE, LENGTH_FILE])
def test_a_file_that_may_not_be_read_is_a_data_error_that_names_it(folder, tmp_path, name):
    (folder / name).chmod(0)
    said = tmp_path / "said"
    with said.open("w") as file:
        if not (child := os.fork()):
            os.chdir(folder)
            if not os.getuid():
                folder.chmod(0o755)
                os.seteuid(65534)
            try:
                open_dataset(local=".")
            except Exception as error:
                file.write(f"{type(error).__name__} {error}")
            file.flush()
            os._exit(0)
    os.waitpid(child, 0)
    assert said.read_text().startswith(f"DataError {name}: cannot be read")
    assert "Permission denied" in said.read_text()
