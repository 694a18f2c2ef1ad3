"""Limits of the operating system: a typed error with a way out."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from streampack import ConfigError, PackedDataLoader, PackedStreamingDataset, Packing, Stream
from streampack.storage.filesystem import is_cut, map_file
from streampack.write import write_stream

ROOT = Path(__file__).parents[2]
NUM_SAMPLES = 600
SPARE = (0, 1, 2, 3, 5, 8, 70)  # remaining descriptors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two streams of many tiny shards, one of them compressed."""
    root = tmp_path_factory.mktemp("streams")
    for name, compression in (("plain", None), ("packed", "zstd")):
        samples = (np.full(30, number % 99, np.int32) for number in range(NUM_SAMPLES))
        write_stream(samples, root / name, compression=compression, size_limit=2_000)
    assert len(list((root / "plain").glob("*.mds"))) > 40
    return root


def dataset_of(folders: Path, cache: Path | None = None) -> PackedStreamingDataset:
    streams = [
        Stream(local=folders / name)
        if cache is None
        else Stream(remote=str(folders / name), local=cache / name)
        for name in ("plain", "packed")
    ]
    return PackedStreamingDataset(streams, packing=Packing(max_seq_len=256), batch_size=4)


def count(loader: PackedDataLoader) -> int:
    return sum(len(np.unique(batch["segments"][:, [1, 3]], axis=0)) for batch in loader)


@contextmanager
def descriptors(spare: int) -> Iterator[None]:
    """Leave only so many file descriptors to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 100, hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def assert_names(refusal: str) -> None:
    """Check that a message names the limit, and blames nothing else."""
    assert "`ulimit -n`" in refusal
    assert f"may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} here" in refusal
    assert "disk" not in refusal


def test_open_shards_take_no_file_descriptors(folders):
    loader = PackedDataLoader(dataset_of(folders))
    assert count(loader) == 2 * NUM_SAMPLES  # shards are unpacked, kernels compiled
    with descriptors(spare=4):
        assert len(loader.dataset) > 0
        assert count(PackedDataLoader(dataset_of(folders))) == 2 * NUM_SAMPLES


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_remote", [False, True])
def test_without_descriptors_the_limit_is_named_and_with_more_the_same_loader_goes_on(
    folders, tmp_path, num_workers, is_remote
):
    refusals: list[str] = []
    for spare in SPARE:
        cache = tmp_path / str(spare) if is_remote else None
        loader = None
        with descriptors(spare):
            try:
                loader = PackedDataLoader(dataset_of(folders, cache), num_workers=num_workers)
                assert len(loader) > 0
                assert count(loader) == 2 * NUM_SAMPLES
            except ConfigError as error:
                refusals.append(str(error))
                assert_names(refusals[-1])
        # The way out: `descriptors` put the limit up again.
        loader = loader or PackedDataLoader(dataset_of(folders, cache), num_workers=num_workers)
        loader.dataset.set_epoch(0)
        assert count(loader) == 2 * NUM_SAMPLES
    assert 1 <= len(refusals) < len(SPARE)


@pytest.fixture
def no_threads():
    """Make starting a thread fail, by asking for a stack larger than the address space."""
    before = threading.stack_size(2**46)
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_start_reading_without_threads_is_named_and_works(folders):
    with pytest.raises(ConfigError, match="set prefetch_threads=0") as raised:
        count(PackedDataLoader(dataset_of(folders)))
    assert "can't start new thread" in str(raised.value)
    assert count(PackedDataLoader(dataset_of(folders), prefetch_threads=0)) == 2 * NUM_SAMPLES


CUT = """
import os, sys, time
from pathlib import Path
from streampack import DataError, PackedDataLoader, PackedStreamingDataset, Packing, Stream
folder, threads = Path(sys.argv[1]), int(sys.argv[2])
dataset = PackedStreamingDataset([Stream(local=folder)], packing=Packing(max_seq_len=256))
loader = PackedDataLoader(dataset, prefetch_threads=threads)
batches = iter(loader)
for _ in range(40):
    next(batches)
def num_running():
    paths = Path("/proc/self/task").glob("*/stat")
    return sum(path.read_text().rpartition(")")[2].split()[0] in "RD" for path in paths)
idle = 0
while idle < 20:  # threads read ahead as far as allowed, and are then not in the middle of a shard
    time.sleep(0.02)
    idle = idle + 1 if num_running() == 1 else 0  # this thread
for path in folder.glob("*.mds"):
    os.truncate(path, 0)
try:
    for batch in batches:
        pass
except DataError as error:
    print(error.uri, error)
"""


@pytest.mark.parametrize("threads", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_shard_that_was_cut_short_under_the_trainer_is_an_error_and_not_sigbus(tmp_path, threads):
    folder = tmp_path / "stream"
    write_stream((np.full(200, 7) for _ in range(3000)), folder, size_limit=2**18, compression=None)
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(folder), str(threads)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "was cut short while it was read" in done.stdout
    assert str(folder / "shard.") in done.stdout.split()[0]


def test_only_a_file_that_lost_bytes_of_its_own_is_cut(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    data = map_file(path)
    assert data.tolist() == list(range(200))
    assert not data.flags.writeable
    assert not is_cut(data)
    other = tmp_path / "other"
    other.write_bytes(b"short")
    other.replace(path)  # the mapped file still exists
    assert not is_cut(data)
    assert data[199] == 199
    path.unlink()
    assert not is_cut(data)
    path.write_bytes(bytes(10))
    data = map_file(path)
    os.truncate(path, 9)
    assert is_cut(data)
    assert not is_cut(np.zeros(5, np.uint8))
    (tmp_path / "empty").touch()
    assert map_file(tmp_path / "empty").shape == (0,)
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none")


STREAM = """
try:
    from streampack import PackedStreamingDataset, Packing, Stream
    PackedStreamingDataset([Stream(local=sys.argv[1])], packing=Packing(max_seq_len=256))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_shared_memory_that_cannot_be_written_is_refused_as_a_dataset_is_made(folders):
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    command = f'mount -t tmpfs -o ro none /dev/shm && exec "{sys.executable}" -c "$0" "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "import sys" + STREAM, folders / "plain"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("ConfigError memory that workers share cannot be made"), done
    assert "make /dev/shm writable" in done.stdout


def test_kernels_that_are_switched_off_are_refused_with_the_variable_that_does_it(folders):
    done = subprocess.run(
        [sys.executable, "-c", "import sys" + STREAM, folders / "plain"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("ConfigError NUMBA_DISABLE_JIT=1 is set"), done
    assert "unset it" in done.stdout
