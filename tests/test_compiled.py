"""The disk cache of kernels: full, closed or torn, it costs only the time to compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

# Reloads one kernel after each kind of damage, as a new process would, and prints its results.
SCRIPT = """
import json, resource, sys, warnings
from pathlib import Path
sys.dont_write_bytecode = True  # Python itself keeps bytecode that was cut short
import numba
from streampack._numba import _warned, compiled, compiled_inline
import kernel_of_a_test as module

def load(factor):
    _warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kernel = compiled(module.times)
        value = kernel(factor)
    hits = sum(kernel.stats.cache_hits.values())
    texts = [str(w.message) for w in found if issubclass(w.category, RuntimeWarning)]
    return {"value": value, "hits": hits, "warned": texts}

"""
DAMAGES = """
cache, results = Path(sys.argv[1]), []
load(2)
whole = {path: path.read_bytes() for path in cache.rglob("*.nb?")}
for path, content in sorted(whole.items()):
    size = len(content)
    torn = [content[:cut] for cut in (0, 1, 20, size // 2, size - 1)]
    torn += [content[: size // 2] + bytes(64) + content[size // 2 + 64 :]]
    torn += [b"garbage", bytes(size), content[:-40] + bytes(40)]
    for damaged in torn:
        for each, was in whole.items():
            each.write_bytes(was)
        path.write_bytes(damaged)
        results.append([path.suffix, load(3), load(5)])
print(json.dumps(results))
"""
FULL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
first, second = load(2), load(3)
print(json.dumps([first, second, [path.name for path in Path(sys.argv[1]).rglob("*.nb*")]]))
"""


def run(body: str, folder: Path, cache: Path) -> Any:
    (folder / "kernel_of_a_test.py").write_text("def times(factor):\n    return 7 * factor\n")
    script = folder / "script.py"
    script.write_text(SCRIPT + body)
    done = subprocess.run(
        [sys.executable, str(script), str(cache)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_torn_file_of_the_kernel_cache_is_thrown_away_and_written_again(tmp_path):
    results = run(DAMAGES, tmp_path, tmp_path / "cache")

    assert {suffix for suffix, *_ in results} == {".nbi", ".nbc"}
    assert [first["value"] for _, first, _ in results] == [21] * len(results)
    for suffix, first, second in results:
        assert len(first["warned"]) <= 1
        if suffix == ".nbc":
            assert first["hits"] == 0
            assert "discarded a cached kernel" in first["warned"][0]
        assert second == {"value": 35, "hits": 1, "warned": []}


def test_a_full_disk_under_the_kernel_cache_is_one_warning(tmp_path):
    first, second, left = run(FULL, tmp_path, tmp_path / "cache")

    assert (first["value"], second["value"]) == (14, 21)
    for each in (first, second):
        assert len(each["warned"]) == 1
        assert "set NUMBA_CACHE_DIR to a folder that is writable" in each["warned"][0]
    assert left == []  # no index that names a data file of an older source


def test_a_deleted_working_directory_is_enough_for_what_is_compiled_and_else_refused(tmp_path):
    body = """
import os
from streampack import ConfigError
gone = Path(sys.argv[1]).parent / "gone"
gone.mkdir()
os.chdir(gone)
gone.rmdir()
for _ in range(2):
    try:
        print(json.dumps(load(2)))
    except ConfigError as error:
        print(json.dumps(str(error)))
        os.chdir("/")
        load(2)
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
"""
    cache = tmp_path / "cache"
    assert run(body, tmp_path, cache)["hits"] == 1
    again = run("print(json.dumps('ok'))", tmp_path, cache)
    assert again == "ok"


def test_an_older_sources_kernel_is_never_taken_for_the_new_one(tmp_path):
    cache = tmp_path / "cache"
    body = """
from streampack._numba import _CacheFile
keep = _CacheFile._save_data
load(2)
old = {path: path.read_bytes() for path in Path(sys.argv[1]).rglob("*.nbc")}
source = Path(module.__file__)
source.write_text(source.read_text().replace("7", "9"))
import importlib
module = importlib.reload(module)
def tear(self, name, data):  # the machine stops between the index and its data file
    pass
_CacheFile._save_data = tear
load(2)
_CacheFile._save_data = keep
assert all(path.read_bytes() == content for path, content in old.items()) and old
print(json.dumps(load(2)))
"""
    assert run(body, tmp_path, cache)["value"] == 18
