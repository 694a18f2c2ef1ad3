"""Worker processes that tokenize: errors keep their types, and a dead one is replaced once."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack.errors import DataError, WorkerError
from streampack.texts import pool as pools
from streampack.texts.chat import ChatEncoder
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.inputs.read import read_rows
from streampack.texts.inputs.values import RowSelection
from streampack.texts.pool import TokenizerPool, tokenizer_pool
from tests.helpers.chats import chat_tokenizer, say


@pytest.fixture
def pool():
    made = TokenizerPool(2)
    yield made
    made.close()


def kill_once(flag: Path) -> str:
    """Die at the first call; return at the second."""
    if not flag.exists():
        flag.touch()
        kill()
    return "done"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise DataError("rows.jsonl, row 3: is bad", uri="rows.jsonl")


def test_tasks_run_in_other_processes_and_their_errors_keep_their_type(pool):
    first = pool.run(os.getpid)
    assert first != os.getpid()
    assert pool.run(os.getpid) == first
    with pytest.raises(DataError, match="row 3: is bad") as raised:
        pool.run(fail)
    assert raised.value.uri == "rows.jsonl"
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        pool.run(partial(divmod, 1, 0))
    assert pool.run(os.getpid) == first


def encoded(folder: Path) -> tuple[list[int], bool]:
    """Return the ids of a conversation, and whether that took torch."""
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    return ChatEncoder(tokenizer)(say("a", "b"))["tokens"].tolist(), "torch._C" in sys.modules


def shape_of_a_tensor() -> tuple[int, ...]:
    """Return that of a tensor of torch, which is imported in two ways."""
    import torch
    from torch.nn.functional import relu

    assert sys.modules["torch"].Tensor is torch.Tensor
    return tuple(relu(torch.ones(2, 3)).shape)


def test_a_worker_imports_torch_where_it_is_used_and_not_for_conversations(pool, tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = ChatEncoder(tokenizer)(say("a", "b"))["tokens"].tolist()
    assert pool.run(partial(encoded, tmp_path)) == (ids, False)
    assert pool.run(shape_of_a_tensor) == (2, 3)
    assert pool.run(partial(encoded, tmp_path)) == (ids, True)


def lists_of(path: Path) -> tuple[list[list[int]], bool]:
    selection = RowSelection("tokens", "tokens")
    (file,) = list_inputs([str(path)])
    rows = [row for batch in read_rows(file, selection) for row in batch.values]
    return [list(map(int, row)) for row in rows], "pandas" in sys.modules


def test_a_worker_reads_lists_of_ids_without_pandas(pool, tmp_path):
    lists = [[1, 2], [], [3]]
    table = pa.table({"tokens": pa.array([[9], *lists], pa.list_(pa.uint16()))}).slice(1)
    pq.write_table(table, tmp_path / "a.parquet")
    assert pool.run(partial(lists_of, tmp_path / "a.parquet")) == (lists, False)


def test_relative_paths_mean_what_they_do_in_this_process(tmp_path, monkeypatch):
    assert tokenizer_pool(1).run(os.getcwd) == os.getcwd()
    monkeypatch.chdir(tmp_path)
    assert tokenizer_pool(1).run(os.getcwd) == str(tmp_path)


def test_a_worker_that_dies_is_replaced_once(pool, tmp_path):
    assert pool.run(partial(kill_once, tmp_path / "flag")) == "done"
    with pytest.raises(WorkerError, match=r"exit code -9 .*what is finished is kept"):
        pool.run(kill)
    assert pool._room.qsize() == 2  # as many tasks as before may run
    assert pool.run(os.getpid)


def test_as_many_tasks_run_at_once_as_there_are_workers(pool):
    begin = time.monotonic()
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(pool.run(partial(pid_after, 0.3))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 2
    assert time.monotonic() - begin >= 0.6


def pid_after(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_a_forked_process_has_workers_of_its_own():
    pool = tokenizer_pool(1)
    own = pool.run(os.getpid)
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        other = tokenizer_pool(1).run(os.getpid)
        os.write(sending, str(other).encode())
        pools._close_pools()
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(receiving, 100)) != own
    assert pool.run(os.getpid) == own


def test_workers_end_with_their_process():
    script = (
        "import os; from streampack.texts.pool import tokenizer_pool;"
        "print(tokenizer_pool(1).run(os.getpid), flush=True); os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{int(said.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(said.stdout)}").exists()


def test_an_idle_worker_ends_and_another_one_takes_its_place(pool, monkeypatch):
    monkeypatch.setattr(pools, "IDLE_S", 0.05)
    first = pool.run(os.getpid)
    pool._idle[0][1].wait(30)
    assert pool.run(os.getpid) != first


def linger() -> None:
    time.sleep(0.2)  # so that another worker starts
    atexit.register(time.sleep, 60)


def test_a_task_does_not_fail_if_all_idle_workers_are_about_to_end(pool, monkeypatch):
    monkeypatch.setattr(pools, "IDLE_S", 0.3)
    monkeypatch.setattr(pools, "END_S", 0.2)
    threads = [threading.Thread(target=pool.run, args=[linger]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    idle = list(pool._idle)
    assert all(pipe.poll(30) for pipe, _ in idle)  # each has closed its pipe, and still exists
    assert [process.poll() for _, process in idle] == [None, None]
    assert pool.run(os.getpid)
