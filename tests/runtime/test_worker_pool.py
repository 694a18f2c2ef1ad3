"""Worker processes: messages through their sockets, and no leftovers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import get_worker_info

from streampack.runtime.worker_pool import Pool
from streampack.runtime.worker_processes import WorkerOptions
from tests.helpers.batches import same
from tests.helpers.builders import stream_of

pytestmark = pytest.mark.processes

LARGE = 1 << 19  # elements; more than fits in a socket's buffer


class Pair(NamedTuple):
    tokens: Any
    mask: Any


SMALL = {
    "mask": torch.tensor([[True], [False], [True]]),
    "ids": torch.arange(5, dtype=torch.int32),
    "none": torch.zeros((0, 3), dtype=torch.int64),
    "turned": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
    "others": [object, "a", 7],
}


def of_kinds(_given: None) -> Any:
    def work(kind: str) -> list[Any]:
        tensor = torch.arange(LARGE)
        if kind == "error":
            raise KeyError("no such sample")
        if kind == "who":
            info = get_worker_info()
            return [(info.id, info.num_workers, info.seed, torch.initial_seed(), random.random())]
        if kind == "nothing to pickle":
            return [lambda: 1]
        return [
            {
                "list": [tensor, 1],
                "pair": Pair(tensor, tensor.view(-1, 2) > 5),
                "odd": OrderedDict(a=tensor.to(torch.bfloat16)),
                "dict": {"a": (tensor, None)},
                "scalar": torch.tensor(2.5),
                "small": SMALL,
            }[kind]
        ]

    return work


def pool_of(num_workers: int, **options: Any) -> Pool:
    return Pool(of_kinds, WorkerOptions(num_workers=num_workers, prefetch_factor=2, **options))


def of_variables(_given: None) -> Any:
    return lambda name: [os.environ.get(name)]


@pytest.mark.own_start
@pytest.mark.parametrize("method", ["fork", "forkserver"])  # spawn: test_worker_processes.py
def test_workers_have_the_variables_of_the_training_process_as_it_starts_them(monkeypatch, method):
    options = WorkerOptions(num_workers=1, prefetch_factor=2, multiprocessing_context=method)
    monkeypatch.setenv("STREAMPACK_TEST_REMOVED", "here")
    found = []
    for changed in ("before", "after"):  # a fork server keeps the variables from its start
        monkeypatch.setenv("STREAMPACK_TEST_CHANGED", changed)
        pool = Pool(of_variables, options)
        found += pool.results(["STREAMPACK_TEST_CHANGED", "STREAMPACK_TEST_REMOVED"])
        pool.end()
        monkeypatch.delenv("STREAMPACK_TEST_REMOVED", raising=False)

    assert found == ["before", "here", "after", None]


def test_results_of_any_form_arrive_as_they_were():
    wanted = torch.arange(LARGE)
    kinds = ["list", "pair", "odd", "dict", "scalar", "small"]
    found = dict(zip(kinds, pool_of(2).results(kinds), strict=True))
    assert torch.equal(found["list"][0], wanted)
    assert found["list"][1] == 1
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].mask, wanted.view(-1, 2) > 5)
    assert isinstance(found["odd"], OrderedDict)
    assert torch.equal(found["odd"]["a"], wanted.to(torch.bfloat16))
    assert torch.equal(found["dict"]["a"][0], wanted)
    assert found["scalar"].item() == 2.5
    assert same(found["small"], SMALL)


def test_an_error_arrives_as_it_was_with_the_workers_traceback_as_a_note():
    with pytest.raises(KeyError, match="no such sample") as caught:
        list(pool_of(1).results(["list", "error"]))
    assert any("reading worker" in note for note in caught.value.__notes__)
    assert any("in work" in note for note in caught.value.__notes__)


def test_a_result_that_cannot_be_pickled_is_an_error_and_not_a_hang():
    with pytest.raises(Exception, match="pickle"):
        list(pool_of(1, timeout=60).results(["nothing to pickle"]))


def test_workers_are_told_apart_as_torch_tells_them_and_seeded_by_torchs_seed():
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        seen.append(list(pool_of(2).results(["who"] * 4)))
    assert seen[0] == seen[1]
    assert [who[:2] for who in seen[0]] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert all(who[2] == who[3] for who in seen[0])
    assert len({who[4] for who in seen[0]}) == 4


SCRIPT = """
import os, signal, sys
from streampack import PackedDataLoader, PackedStreamingDataset, Packing, Stream

def as_list(batch):
    return [batch["tokens"].repeat(8192, 1), batch["labels"]]

if __name__ == "__main__":
    dataset = PackedStreamingDataset(
        [Stream(local=sys.argv[1])], packing=Packing(max_seq_len=64), batch_format=as_list)
    loader = PackedDataLoader(dataset, num_workers=2, multiprocessing_context=sys.argv[2])
    for number, (tokens, labels) in enumerate(loader):
        assert tokens.nbytes > 1 << 20
        if number == 5:
            break
    if sys.argv[3] == "kill":
        os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.own_start
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", ["leave", "kill"])
def test_a_format_that_returns_lists_leaves_nothing_behind_however_the_job_ends(
    tmp_path, method, end
):
    stream_of(tmp_path / "s", [50] * 40)
    (tmp_path / "script.py").write_text(SCRIPT)
    # Longer than the maximum length of a Unix socket's address.
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "s"), method, end],
        env=os.environ | {"TMPDIR": str(temporary)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    assert list(temporary.iterdir()) == []
