"""Kernels work where numba cannot cache on disk, and are not compiled more often than needed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import streampack
from streampack.gather.kernels import gather_tokens
from streampack.pack import kernels
from streampack.pack.kernels import search

SCRIPT = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import streampack
    from streampack.config import Packing
    from streampack.pack import make_packer
    packer = make_packer(Packing(max_seq_len=8, method="next_fit"))  # quick to compile
    packs = packer.add(np.array([[0, 0, s, 0, n, n] for s, n in enumerate([5, 4, 6, 2, 1, 3])]))
print(streampack.__file__)
print([pack[:, 2].tolist() for pack in packs])
for warning in caught:
    print(warning.category.__name__, warning.message)
"""
PACKED = "[[0], [1], [2, 3]]"


def run_script(package: Path, **env: str) -> list[str]:
    """Run the script on this copy of the package, and return the lines it prints."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, *lines = done.stdout.splitlines()
    assert file.startswith(str(package))
    return lines


def copy_package(folder: Path) -> Path:
    """Copy the package, with a file in the place of numba's cache folder."""
    source = Path(streampack.__file__).parent
    shutil.copytree(source, folder / "streampack", ignore=shutil.ignore_patterns("__pycache__"))
    # Modes do not stop root from writing, a file in the folder's place does.
    for inner in (folder / "streampack").rglob("*.py"):
        (inner.parent / "__pycache__").touch()
    return folder


@pytest.mark.processes
def test_kernels_work_with_one_warning_where_neither_package_nor_home_can_be_written(tmp_path):
    package = copy_package(tmp_path)
    nowhere = "/dev/null/nowhere"

    packed, *warned = run_script(
        package, HOME=nowhere, XDG_CACHE_HOME=nowhere, NUMBA_CACHE_DIR=nowhere
    )

    assert packed == PACKED
    assert len(warned) == 1
    assert warned[0].startswith("RuntimeWarning kernels are compiled again in this process")
    assert "set NUMBA_CACHE_DIR" in warned[0]


@pytest.mark.processes
def test_kernels_are_kept_in_numba_cache_dir_without_a_warning(tmp_path):
    package = copy_package(tmp_path / "site")
    cache = tmp_path / "cache"

    assert run_script(package, NUMBA_CACHE_DIR=str(cache)) == [PACKED]
    assert list(cache.rglob("kernels.fit_in_order*.nbc"))


def test_kernels_that_make_no_arrays_count_no_references_to_them():
    for kernel in (search, gather_tokens):
        assert kernel.targetoptions["_nrt"] is False


@pytest.mark.parametrize("kernel", ["fill_room", "one_pack", "run_tier", "run_tiers", "search"])
def test_what_takes_seconds_to_compile_is_called_with_no_constant_of_pythons(kernel):
    # numba would compile it for each of them: it took two_tiers three times as long.
    tree = ast.parse(Path(kernels.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [arg for call in calls if ast.unparse(call.func) == kernel for arg in call.args]
    given += [part for arg in given if isinstance(arg, ast.Tuple) for part in arg.elts]
    assert given
    assert not [arg.value for arg in given if isinstance(arg, ast.Constant)]
    names = {arg.id for arg in given if isinstance(arg, ast.Name) and arg.id.isupper()}
    assert not [name for name in names if isinstance(getattr(kernels, name), int)]
