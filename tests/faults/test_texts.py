"""Texts whose store fails, whose disk is read-only or full, and whose cache is incomplete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from streampack import Buffers, Texts
from streampack.texts import units
from streampack.texts.counts import write_index
from streampack.texts.inputs.listing import list_inputs
from streampack.texts.pool import tokenizer_pool
from tests.helpers.faults import harness
from tests.helpers.inputs import jsonl, packed, write_table
from tests.helpers.texts import dataset_of, ids_of, texts, tokens_of, write_files

FEW = texts(40)
FAULTS = ("status", "reset", "short")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(units, "SHARD_BYTES", 500)


def _slow(kind: str) -> object:
    return pytest.param(kind, marks=pytest.mark.slow)


def put(to: Path, kind: str) -> str:
    """Write the rows into a folder of a store, and return the end of their address."""
    if kind == "txt":
        for number, text in enumerate(FEW):
            (to / f"{number:03}.txt").write_text(text)
        return ""
    path = to / f"rows.{kind}"
    if kind == "parquet":
        write_table(path, pa.table({"text": FEW}), 10)
    else:
        path.write_bytes(packed(jsonl(FEW), path.suffix))
    return path.name


@pytest.mark.parametrize("kind", ["parquet", *(_slow(kind) for kind in ("jsonl", "txt"))])
def test_texts_of_a_store_that_fails_4_requests_of_10_are_exact(folder, store, kind, tmp_path):
    pool = tokenizer_pool(2)
    pool.close()  # so that its processes know this store
    name = put(store.folder, kind)
    files = f"s3://{store.bucket}/{name}"
    index = {}
    if kind.startswith("jsonl"):
        write_index(list_inputs([files]), tmp_path / "index")
        index = {"index": str(tmp_path / "index")}
    faults = [
        store.server.add(each, share=0.4 / len(FAULTS), seed=seed, status=503)
        for seed, each in enumerate(FAULTS)
    ]
    options = {"local": tmp_path / "cache", "lengths": "lazy", **index}
    source = Texts(files, folder / "tokenizer", **options)
    found = tokens_of(dataset_of(source, buffers=Buffers(tokenizing=2)))
    assert sorted(found) == sorted(filter(None, ids_of(FEW)))
    assert sum(fault.given for fault in faults) >= 0.2 * len(store.server.requests())
    assert harness.temporary_names(tmp_path) == []
    pool.close()


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from streampack import DataError
from streampack.texts import units
from tests.helpers import texts

units.SHARD_BYTES = 1000
folder, cache = map(Path, sys.argv[1:])
wanted = sorted(filter(None, texts.ids_of(texts.texts())))
kinds = {"parquet": folder / "rows.parquet", "list": [{"text": text} for text in texts.texts()]}

def read(kind, local, **options):
    source = texts.Texts(kinds[kind], folder / "tokenizer", local=cache / local, **options)
    try:
        return sorted(texts.tokens_of(texts.dataset_of(source))) == wanted
    except DataError as error:
        return "cannot be written" in str(error) and "set local= to a folder" in str(error)

made = [read("parquet", "parquet"), read("list", "list"), read("parquet", "part", lengths="lazy")]
next((cache / "part" / "tokens").glob("??/[0-9a-f]*")).unlink()
for command in (["--bind", str(cache), str(cache)], ["-o", "remount,ro,bind", str(cache)]):
    subprocess.run(["mount", *command], check=True)
whole = [read("parquet", "parquet"), read("list", "list"), read("list", "list", lengths="lazy")]
refused = [read("parquet", "none"), read("list", "none"), read("parquet", "part", lengths="lazy"),
           read("parquet", "part")]
print(made, whole, refused)
"""


def test_a_whole_cache_on_a_read_only_disk_is_read_and_an_incomplete_one_refused(folder, tmp_path):
    command = ["unshare", "--mount", sys.executable, "-c", READ_ONLY, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.stderr.startswith(("unshare", "mount")):
        pytest.skip("needs a mount namespace of its own: run as root, with unshare")
    assert done.stdout == f"{[True] * 3} {[True] * 3} {[True] * 4}\n", done.stderr
