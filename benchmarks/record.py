"""One JSON line per result, with the same fields for every bench, so that anyone can repeat it.

::

    {"bench": "pack/next_fit", "unit": "samples/s", "median": 4.6e6, "runs": [...],
     "params": {...}, "versions": {...}, "commit": "4e8d474", "machine": {...}, ...}
    {"bench": "peers/fairseq2", "skipped": "no wheel for this torch", ...}

A bench prints its lines and, with `--out FILE`, appends them there; report.py makes tables of them.

Cost: milliseconds a line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["emit", "line", "options", "skipped", "versions"]

HOME = Path(__file__).resolve().parent.parent
DATA = HOME / "build" / "bench"
SITE = str(HOME / "tests" / "helpers" / "site")
"""When on PYTHONPATH, this lets torchvision be imported with a torch it was not built for."""
PACKAGES = ("numpy", "numba", "torch", "streampack", "mosaicml-streaming", "zstandard")
NOT_PARAMS = ("out", "data")  # paths of this machine, which mean nothing elsewhere


def options(doc: str, *, runs: int = 5, num_samples: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benches share.

    Args:
        doc: The bench's docstring; its first line is the help.
        runs: Default of `--runs`.
        num_samples: Default of `--num-samples`; by default, all samples of the workload.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--runs", type=int, default=runs, help="how often to measure")
    parser.add_argument(
        "--num-samples", type=int, default=num_samples, help="samples of the workload"
    )
    parser.add_argument("--out", type=Path, help="a file that the lines are appended to")
    parser.add_argument("--data", type=Path, default=DATA, help="where shards are kept")
    return parser


@lru_cache
def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(HOME), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


@lru_cache
def _machine() -> dict[str, Any]:
    """Return a description of the machine, without its name."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    models = [row.split(":", 1)[1].strip() for row in text.splitlines() if "model name" in row]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if text else 0
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed here."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name).split("+")[0]  # without the local build
        except metadata.PackageNotFoundError:
            continue
    return found


def _frame(bench: str, params: dict[str, Any], packages: Sequence[str]) -> dict[str, Any]:
    return {
        "bench": bench,
        "params": {name: value for name, value in params.items() if name not in NOT_PARAMS},
        "versions": versions((*PACKAGES, *packages)),
        "commit": _commit(),
        "machine": _machine(),
    }


def _short(value: float) -> float:
    """Keep six digits."""
    return float(f"{value:.6g}")


def line(
    bench: str,
    unit: str,
    runs: Sequence[float],
    params: dict[str, Any],
    packages: Sequence[str] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Return one result.

    Args:
        bench: What was measured, such as "pack/next_fit".
        unit: Of the runs and their median, such as "tokens/s".
        runs: Every run.
        params: All that the result depends on.
        packages: More packages to record the versions of.
        fields: What else was measured, such as `fill`.

    >>> line("pack/concat", "samples/s", [1.0, 3.0, 2.0], {"max_seq_len": 8}, fill=1.0)["median"]
    2.0
    """
    measured = {"unit": unit, "median": _short(statistics.median(runs))}
    measured["runs"] = [_short(run) for run in runs]
    return _frame(bench, params, packages) | measured | fields


def skipped(
    bench: str, why: str, params: dict[str, Any] | None = None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a line for a skipped measurement, with the reason."""
    return _frame(bench, params or {}, packages) | {"skipped": " ".join(why.split())[:300]}


def emit(record: dict[str, Any], out: Path | None = None) -> None:
    """Print a line, and append it to a file if there is one."""
    text = json.dumps(record)
    print(text, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(text + "\n")
