"""Change one line of logic at a time, and see whether a test notices.

::

    make mutants                                  120 changes of seed 1
    make mutants OPTIONS="--quick"                the same, without the tests of tests/behaviour
    make mutants OPTIONS="--seed 7 --number 30 --rooms plan,gather"
    make mutants OPTIONS="--only 17 29"           two of the 120 again

A clone of the last commit in a temporary folder is changed, never this tree. A change is another
comparison, operator, constant, flag or branch, `min` for `max`, or a statement left out.

Four groups of tests run one after the other until a test fails that passes without the change:

1. files that name the changed module, or are named after it;
2. the others of its folder and of the folders that use it (`ROOMS`), and tests/test_*.py;
3. those of tests/behaviour, apart from `BLIND`;
4. the first two again, with 60 generated examples for each law instead of 8.

Slow tests never run. A change counts as found if a test fails, if tests cannot be collected or if
they run into the limit of time. One that no test notices is printed as SURVIVED. It needs a test,
unless it has no effect: 5 to 10 in 100 have none. A survivor takes minutes, a change that is found
mostly seconds. Results are appended to build/mutants.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.helpers.mutations import Change, draw

ROOMS = {
    "plan": ["plan", "planned"],
    "planned": ["planned", "loader", "lookback"],
    "gather": ["gather", "batch", "planned"],
    "online": ["online", "loader"],
    "storage": ["storage", "stores", "faults"],
    "mix": ["mix", "plan", "online"],
    "order": ["order", "plan"],
    "pack": ["pack", "plan", "online"],
    "batch": ["batch", "planned"],
    "streams": ["streams", "planned", "flat", "online"],
    "flat": ["flat", "streams"],
    "texts": ["texts", "write", "cli"],
    "runtime": ["runtime", "loader"],
    "write": ["write", "cli", "streams"],
    "index": ["index", "cli", "flat"],
}
"""The folders of tests that could notice a change in a folder of streampack/; others: their own."""

BLIND = [
    *("install", "benchmarks", "examples", "words", "architecture", "docs", "readme", "links"),
    *("other_environments", "startup", "leaking_models"),
]
"""Files of tests/behaviour that are slow and not about logic."""

EXAMPLES, MORE_EXAMPLES = 8, 60
MEMORY_BYTES = 12 << 30
VERDICTS = ["failed", "timeout", "SURVIVED"]


def groups_of_tests(root: Path, change: Change) -> list[list[str]]:
    """Return the files of the first three groups, as paths from the root."""
    module = change.file.removesuffix(".py").replace("/", ".")
    folders = [root / "tests" / folder for folder in ROOMS.get(change.room, [change.room])]
    room = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    room += sorted((root / "tests").glob("test_*.py"))
    blind = {f"test_{name}" for name in BLIND}
    behaviour = sorted((root / "tests" / "behaviour").rglob("test_*.py"))
    behaviour = [path for path in behaviour if path.stem not in blind]
    name = f"test_{Path(change.file).stem}"
    near = [path for path in room + behaviour if path.stem == name or module in path.read_text()]
    groups: list[list[str]] = []
    seen: set[Path] = set()
    for group in (near, room, behaviour):
        fresh = [path for path in dict.fromkeys(group) if path not in seen]
        seen.update(fresh)
        groups.append([str(path.relative_to(root)) for path in fresh])
    return groups


def callers_compiled(root: Path, changed: Path) -> set[Path]:
    """Return the other files with kernels that may call kernels of a file, directly or not.

    numba keeps compiled kernels until their own file is modified, not one that they call.
    """
    texts = {path: path.read_text() for path in (root / "streampack").rglob("*.py")}
    texts = {path: text for path, text in texts.items() if "_numba import" in text}
    found, todo = set(), [changed] if changed in texts else []
    while todo:
        *folders, name = todo.pop().relative_to(root).with_suffix("").parts
        named = re.compile(rf"{'.'.join(folders)}(\.| import .*\b){name}\b")
        callers = {path for path, text in texts.items() if named.search(text)} - found
        found |= callers
        todo += callers
    return found - {changed}


def _limit_memory() -> None:
    """Let a changed loop that allocates without end fail, rather than the machine."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _first_failure(output: str) -> str:
    lines = output.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    first = (failed or lines[-1:] or [""])[0].split(" - ")[0]
    return first.removeprefix("FAILED ").removeprefix("ERROR ")[:200]


class Runner:
    """Runs tests in a changed clone, and knows which of them fail in an unchanged one too."""

    def __init__(self, scratch: Path, limit_s: float, *, is_quick: bool) -> None:
        self.root = scratch / "tree"
        self.failing: set[str] = set()
        """Tests that fail without a change."""
        self._plain = scratch / "plain"
        self._limit_s = limit_s
        self._is_quick = is_quick
        self._cache = scratch / "numba"
        self._cache.mkdir()
        self._checked: dict[str, bool] = {}
        clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "."]
        for tree in (self.root, self._plain):
            subprocess.run([*clone, str(tree)], check=True)

    def judge(self, change: Change) -> tuple[str, str]:
        """Return one of `VERDICTS`, and the first test that failed."""
        near, room, behaviour = groups_of_tests(self.root, change)
        runs = [(near, EXAMPLES), (room, EXAMPLES)]
        if not self._is_quick:
            runs += [(behaviour, EXAMPLES), (near + room, MORE_EXAMPLES)]
        with self._changed(change) as cache:
            for tests, examples in runs:
                result, test = self._run_known(tests, examples, cache)
                if result != "passed":
                    return result, test
        return "SURVIVED", ""

    @contextmanager
    def _changed(self, change: Change) -> Iterator[Path]:
        """Change the clone, and yield the folder of compiled kernels to use while it is."""
        path = self.root / change.file
        lines = path.read_text().split("\n")
        lines[change.line - 1] = change.new
        stale = {path, *callers_compiled(self.root, path)}
        before = {file: (file.read_text(), file.stat().st_mtime_ns) for file in stale}
        cache = self._cache
        if "_numba import" in before[path][0]:
            cache = self._cache.with_name("numba-changed")
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(self._cache, cache)
        try:
            path.write_text("\n".join(lines))
            for file in stale:
                os.utime(file)
            yield cache
        finally:
            for file, (text, modified_ns) in before.items():
                file.write_text(text)
                os.utime(file, ns=(modified_ns, modified_ns))

    def _run_known(self, tests: list[str], examples: int, cache: Path) -> tuple[str, str]:
        """Run tests, again without each one that fails without the change."""
        while True:
            result, test = self._run(self.root, tests, examples, cache)
            if result != "failed" or "::" not in test or self._passes_unchanged(test):
                return result, test
            self.failing.add(test)

    def _passes_unchanged(self, test: str) -> bool:
        if test not in self._checked:
            result, _ = self._run(self._plain, [test], EXAMPLES, self._cache)
            self._checked[test] = result == "passed"
        return self._checked[test]

    def _run(self, tree: Path, tests: list[str], examples: int, cache: Path) -> tuple[str, str]:
        """Return "passed", "failed" or "timeout", and the first test that failed."""
        if not tests:
            return "passed", ""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--tb=line", "--no-header", "--no-showlocals", "-m", "not slow"]
        if len(tests) > 3:
            command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command += [part for test in sorted(self.failing) for part in ("--deselect", test)]
        # No byte code, which would outlive a second change of a file within one second.
        environment = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"NUMBA_CACHE_DIR": str(cache), "STREAMPACK_TEST_EXAMPLES": str(examples)}
        process = subprocess.Popen(
            command + tests,
            cwd=tree,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        nothing_selected = 5
        if process.returncode in (0, nothing_selected):
            return "passed", ""
        return "failed", _first_failure(output)


def judge_all(runner: Runner, changes: list[Change], seed: int) -> None:
    """Judge changes one by one, print each verdict, and append it to build/mutants.jsonl."""
    results = Path("build/mutants.jsonl")
    results.parent.mkdir(exist_ok=True)
    counts = dict.fromkeys(VERDICTS, 0)
    for change in changes:
        begun_s = time.monotonic()
        verdict, test = runner.judge(change)
        seconds = round(time.monotonic() - begun_s)
        counts[verdict] += 1
        print(f"{change.id:4} {verdict:8} {seconds:5} s  {change}  | {test}", flush=True)
        result = asdict(change) | {"seed": seed, "verdict": verdict, "by": test, "seconds": seconds}
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
    failed, late, survived = counts.values()
    print(f"{failed} found, {late} ran into the limit of time, {survived} survived")
    if runner.failing:
        print("fail without a change, too:", *sorted(runner.failing))


def main() -> None:
    """Draw changes of the last commit, and print them or judge them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--rooms", default="plan,planned,gather,online,storage,mix,order,pack")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the changes to judge")
    parser.add_argument("--quick", action="store_true", help="run the first two groups only")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for one group of tests")
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        runner = Runner(Path(name), options.limit, is_quick=options.quick)
        changes = draw(runner.root, options.rooms.split(","), options.number, options.seed)
        if options.only is not None:
            changes = [change for change in changes if change.id in options.only]
        if not options.list:
            judge_all(runner, changes, options.seed)
            return
        for change in changes:
            print(change.id, change)


if __name__ == "__main__":
    main()
