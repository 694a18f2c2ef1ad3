"""Folders, pipes and devices in place of a stream's files are refused, not read forever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streampack import DataError, PackedStreamingDataset, Packing, Stream
from streampack.mds.index import INDEX_FILE
from streampack.mds.length_file import LENGTH_FILE
from streampack.write import write_lengths
from tests.helpers.builders import write_stream_files

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
def folder(tmp_path: Path) -> Path:
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
