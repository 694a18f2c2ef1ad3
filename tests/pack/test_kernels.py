"""Kernels work where numba cannot cache on disk, and are not compiled more often than needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import streampack

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
    assert list(cache.rglob("in_order.fit_in_order*.nbc"))
