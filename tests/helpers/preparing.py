"""Inputs and outputs of jobs that write streams."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from streampack.texts import RowFormat
from streampack.write import WriteOptions
from streampack.write.job_output import LocalOutput
from tests.helpers.words import word_tokenizer

WORDS = tuple("abcdefgh")


def tokenizer_file(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    word_tokenizer(*WORDS).save(str(path))
    return path


def texts(num_rows: int, seed: int = 0) -> list[str]:
    return [
        " ".join(WORDS[(i * 7 + j * (seed + 3)) % len(WORDS)] for j in range((i * 13 + seed) % 41))
        for i in range(num_rows)
    ]


def jsonl_file(path: Path, rows: Iterable[Any]) -> Path:
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def text_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"text": text, "url": f"https://example.org/{i}", "score": i / 4}
        for i, text in enumerate(texts(num_rows, seed))
    ]


def options_of(folder: Path, **options: Any) -> WriteOptions:
    rows = RowFormat(tokenizer=tokenizer_file(folder), columns=("url", "score"))
    return WriteOptions(
        **{"rows": rows, "part_bytes": 4000, "size_limit": 1500, "num_workers": 1, **options}
    )


def write_command(folder: Path, out: str, *options: str) -> list[str]:
    """Return a command that writes the folder's `rows.jsonl` in many parts."""
    return [
        *(sys.executable, "-m", "streampack", "write", str(folder / "rows.jsonl")),
        *("--out", str(folder / out), "--tokenizer", str(folder / "tokenizer.json")),
        *("--size-limit", "8kb", *options),
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".streampack" not in path.parts
    }


class Crash(BaseException):
    """An exception that no code catches, just as no code runs after a kill -9."""


@dataclass
class CrashingOutput:
    """An output folder whose user is killed at a step, leaving the files of a killed process.

    Each write has three steps: before it, with its bytes in a temporary file, and after it.
    """

    inner: LocalOutput
    crash_at: int
    """The step at which to crash, or -1."""
    step: int = 0
    log: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, name: str, data: bytes) -> None:
        self._steps(name, data, lambda: self.inner.put(name, data))

    def put_new(self, name: str, data: bytes) -> bool:
        return bool(self._steps(name, data, lambda: self.inner.put_new(name, data)))

    def _steps(self, name: str, data: bytes, call: Callable[[], Any]) -> Any:
        self.log.append(name)
        self._maybe_crash()
        path = Path(self.inner.url, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.killed{self.step}.partial")
        temporary.write_bytes(data[: len(data) // 2])
        self._maybe_crash()
        temporary.unlink()
        result = call()
        self._maybe_crash()
        return result

    def _maybe_crash(self) -> None:
        self.step += 1
        if self.step - 1 == self.crash_at:
            raise Crash


@dataclass
class StoppedOutput:
    """An output folder whose user pauses before a step until `other` has run, or for a second."""

    inner: LocalOutput
    stop_at: int
    other: Callable[[], Any]
    step: int = 0
    running: list[Future[Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._step, found) if callable(found) else found

    def _step(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.step += 1
        if self.step - 1 == self.stop_at:
            pool = ThreadPoolExecutor(1)
            self.running = [pool.submit(self.other)]
            wait(self.running, 1)
        return call(*arguments)
