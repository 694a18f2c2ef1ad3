"""The local disk: locks are released when their owner ends, and shared folders are recognised."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from streampack._paths import replaced
from streampack.storage import filesystem as disk_module
from streampack.storage.filesystem import WRITE_BYTES, LocalFilesystem, LockBusyError


def hold_for_ever(path: Path, pipe: Connection) -> None:
    with LocalFilesystem().lock(path, 0):
        pipe.send("held")
        pipe.recv()


def replace_for_ever(path: Path, pipe: Connection) -> None:
    with replaced(path) as temporary:
        temporary.write_bytes(b"half")
        pipe.send("written")
        pipe.recv()


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Write a table of mounts with these folders as mount points of these kinds."""

    def write(**kinds: str) -> None:
        lines = ["20 1 8:1 / / rw - ext4 /dev/sda1 rw"]
        for number, (name, kind) in enumerate(kinds.items()):
            point = str(tmp_path / name).replace(" ", r"\040")
            lines.append(f"{30 + number} 20 0:{number} / {point} rw shared:1 - {kind} source rw")
        (tmp_path / "mountinfo").write_text("\n".join(lines))
        monkeypatch.setattr(disk_module, "MOUNTS", tmp_path / "mountinfo")
        disk_module._is_network.cache_clear()

    yield write
    disk_module._is_network.cache_clear()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ext4", False),
        ("tmpfs", False),
        ("fuseblk", False),
        ("nfs4", True),
        ("lustre", True),
        ("fuse.s3fs", True),
        ("cifs", True),
        ("9p", True),
    ],
)
def test_network_file_systems_are_told_by_their_kind(tmp_path, mounts, kind, expected):
    mounts(shared=kind)
    assert LocalFilesystem().is_network(tmp_path / "shared" / "not" / "there" / "yet") is expected
    (tmp_path / "shared").mkdir()
    assert LocalFilesystem().is_network(tmp_path / "shared") is expected
    assert LocalFilesystem().is_network(tmp_path) is False


def test_the_innermost_and_latest_mount_of_a_folder_counts_also_with_spaces_in_its_name(
    tmp_path, mounts
):
    mounts(**{"a b": "nfs4", "a b/inner": "ext4", "a": "xfs"})
    assert LocalFilesystem().is_network(tmp_path / "a b" / "x")
    assert not LocalFilesystem().is_network(tmp_path / "a b" / "inner" / "x")
    assert not LocalFilesystem().is_network(tmp_path / "a")


def test_files_of_network_file_systems_are_read_into_memory(tmp_path, mounts):
    file = tmp_path / "shared" / "x"
    file.parent.mkdir()
    file.write_bytes(b"abc")
    mounts(shared="ext4")
    assert LocalFilesystem().map(file).base is not None
    mounts(shared="nfs4")
    data = LocalFilesystem().map(file)
    file.write_bytes(b"")  # reading a real memory map would now kill the process
    assert data.tobytes() == b"abc"


@pytest.mark.processes
def test_a_lock_is_busy_while_held_and_free_once_its_holder_is_killed(tmp_path):
    path = tmp_path / "x.lock"
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    holder = fork.Process(target=hold_for_ever, args=(path, theirs), daemon=True)
    holder.start()
    assert ours.poll(30)
    with pytest.raises(LockBusyError), LocalFilesystem().lock(path, 0):
        pass
    holder.kill()
    holder.join(30)
    with LocalFilesystem().lock(path, 0):
        pass


@pytest.mark.processes
def test_what_a_killed_writer_left_is_removed_by_the_next_and_a_living_one_keeps_it(tmp_path):
    path = tmp_path / "lengths[1].bin"
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    writer = fork.Process(target=replace_for_ever, args=(path, theirs), daemon=True)
    writer.start()
    assert ours.poll(30)
    others = [f".{path.name}", f".{path.name}.bak", f".{path.name}.{'0' * 32}.x"]
    for name in others:
        (tmp_path / name).touch()
    for content in (b"living", b"killed"):
        if content == b"killed":
            writer.kill()
            writer.join(30)
        with replaced(path) as temporary:
            temporary.write_bytes(content)
        assert path.read_bytes() == content
        names = {each.name for each in tmp_path.iterdir()} - {path.name, *others}
        assert len(names) == (content == b"living")
    assert len(list(tmp_path.iterdir())) == 4


def test_two_threads_of_one_process_shut_each_other_out(tmp_path):
    with (
        LocalFilesystem().lock(tmp_path / "x.lock", 0),
        pytest.raises(LockBusyError),
        LocalFilesystem().lock(tmp_path / "x.lock", 0.01),
    ):
        pass


@pytest.mark.parametrize("num_bytes", [0, 1, WRITE_BYTES, 3 * WRITE_BYTES + 1])
def test_what_is_written_is_every_piece_as_it_was_when_it_was_asked_for(tmp_path, num_bytes):
    pieces = [bytes([i]) * num_bytes for i in range(3)]
    buffer = bytearray(num_bytes)

    def filled_anew():
        for piece in pieces:
            buffer[:] = piece
            yield memoryview(buffer)

    LocalFilesystem().write(tmp_path / "a", pieces)
    LocalFilesystem().write(tmp_path / "b", filled_anew())
    expected = b"".join(pieces)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_private_folder_of_another_user_is_refused(tmp_path):
    LocalFilesystem().make_folder(tmp_path / "mine", is_private=True)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(PermissionError, match="theirs belongs to another user"):
        LocalFilesystem().make_folder(tmp_path / "theirs", is_private=True)
