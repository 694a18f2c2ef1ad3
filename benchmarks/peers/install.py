"""Install every peer into the venv of this interpreter, one by one, and note the failures.

::

    requirements-peers.txt   pins         peers.json   {"fairseq2n": "why it is not there", ...}

    python benchmarks/peers/install.py .venv-peers/peers.json

Each peer must work with the torch version that streampack pins, so none can install another one; if
a peer is incompatible with it, it is omitted and pip's reason is recorded.

Cost: about a minute, most of it downloads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent.parent
# What to install for each peer; pip resolves its other dependencies, or they are present already.
PEERS = {
    "grain": ["grain"],
    "litdata": ["litdata"],
    "trl": ["trl"],
    "torchtune": ["torchtune", "torchao"],
    "lancedb": ["lancedb"],
    "zephon": ["zephon[parquet]"],
    # Their other dependencies pin another torch or pull in gigabytes of CUDA, all unused here.
    "axolotl": ["--no-deps", "axolotl"],
    "torchdata": ["--no-deps", "--target", "{venv}/torchdata", "torchdata==0.8.0"],
    # It wants a numpy that MosaicML's library does not, so it would need a folder of its own.
    "fairseq2n": ["--target", "{venv}/fairseq2", "{torch}", "fairseq2n==0.8.1"],
}
ALONE = ("torchdata", "fairseq2n")  # other versions than streampack uses, in folders of their own


def constraint(name: str) -> str:
    """Return the line that pins a package in constraints.txt."""
    rows = (HOME / "constraints.txt").read_text().splitlines()
    return next(row for row in rows if row.startswith(f"{name}=="))


def install(name: str, wanted: list[str], venv: Path) -> str | None:
    """Install one peer; return why it cannot be, or None."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    command += [
        "--no-compile",
        *(word.format(venv=venv, torch=constraint("torch")) for word in wanted),
    ]
    if name not in ALONE:
        command += ["-c", str(HOME / "constraints.txt"), constraint("torch")]
        command += ["-c", str(HOME / "benchmarks" / "requirements-peers.txt")]
    if "--no-deps" in wanted and name not in ALONE:
        command.remove(constraint("torch"))  # it is there
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return None
    rows = [row.strip() for row in (done.stdout + done.stderr).splitlines()]
    causes = [row for row in rows if " depends on " in row or "requires " in row]
    errors = [row.removeprefix("ERROR: ") for row in rows if row.startswith("ERROR: ")]
    return "pip: " + "; ".join((causes or errors)[:2])


def main() -> None:
    """Install all, and write what failed."""
    notes = Path(sys.argv[1])
    failed: dict[str, str] = {}
    for name, wanted in PEERS.items():
        why = install(name, wanted, notes.parent.resolve())
        print(f"{name}: {why or 'installed'}", flush=True)
        if why:
            failed[name] = why
    notes.write_text(json.dumps(failed, indent=1) + "\n")


if __name__ == "__main__":
    main()
