"""Peers on the same samples in the same run, each in a separate process.

::

    bench_peers.py --> child "mosaicml"   <-- task (one line of JSON)      --> tokens, seconds
                   --> child "lit_data"   <-- task                         --> ...
                   --> child "streampack_ours" ...

    kind: read samples | load batches | pack samples in memory | plan them      see peers/task.py
          load from texts | resume on half the ranks

Children stay alive and take turns, so that background noise affects all of them equally; the first
round is a warm-up and does not count. A peer that fails, or cannot be imported, gets a line with
the reason. `of_streaming` is relative to StreamingDataset's reading with the same number of
workers, and `of_collator` to its packing collator. Texts, as JSON lines or Parquet, and lists of
token ids in Parquet are measured in processor seconds of a peer's whole process tree, and
`of_tokenizer` is relative to the tokenizer alone.

Cost: about five minutes, one of them to convert data for litData and LanceDB, and about 20 of a
core for texts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import record
import workloads
from peers.task import ROWS, Task

# The module of each adapter, and the package that it measures.
ADAPTERS = {
    "streampack_ours": "streampack",
    "mosaicml": "mosaicml-streaming",
    "lit_data": "litdata",
    "lance_db": "lancedb",
    "grain_packers": "grain",
    "trl_pack": "trl",
    "axolotl_multipack": "axolotl",
    "torchtune_packed": "torchtune",
    "torchdata_bucketizer": "torchdata",
    "llamafactory_knapsack": "llamafactory",
    "tokenizer_alone": "tokenizers",
    "streampack_texts": "streampack",
    "zephon_pipeline": "zephon",
}
GROUPS = {"texts": "texts", "resume": "texts"}  # of lines, by kind; of the others: "peers"
WITHOUT_ADAPTER = ("fairseq2n",)
GRID = {"web": 8192, "sft": 4096, "jsonl": 4096, "parquet": 4096, "lists": 8192}
MEMORY_SAMPLES = {"web": 10_000, "sft": 20_000}


def serve(name: str) -> None:
    """Answer tasks from standard input until it closes; all other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries, even from C

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    with redirect_stdout(sys.stderr):
        try:
            adapter = import_module(f"peers.{name}")
        except Exception as error:  # an import can fail in any way
            answer({"error": f"{type(error).__name__}: {error}"})
            return
        answer(
            {
                "versions": record.versions(adapter.PACKAGES),
                "cases": {
                    name: {"kind": case.kind, "workers": case.workers, "of": case.workloads}
                    for name, case in adapter.CASES.items()
                },
            }
        )
        for row in sys.stdin:
            asked = json.loads(row)
            try:
                work, task = adapter.CASES[asked["case"]].work, Task(**asked["task"])
                begin = time.process_time()
                measured = work(task).answer()
                if measured["cpu_s"] is None:
                    measured["cpu_s"] = time.process_time() - begin
                answer(measured)
            except Exception as error:  # a failure is a line, not the end of the run
                answer({"error": f"{type(error).__name__}: {error}"})


class Child:
    """A peer's process.

    Args:
        name: The adapter.
        venv: Where old releases are in folders of their own.
    """

    def __init__(self, name: str, venv: Path) -> None:
        self.name = name
        paths = [str(venv / "torchdata")] if name == "torchdata_bucketizer" else []
        paths += [record.SITE, os.environ.get("PYTHONPATH", "")]
        quiet = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | quiet,
        )
        self.about: dict[str, Any] = {}

    def begin(self) -> None:
        """Wait until the child has imported its library, and read its list of cases."""
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        row = self._process.stdout.readline() if self._process.stdout else ""
        if not row:
            return {"error": f"its process ended with code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(row)
        return answer

    def ask(self, case: str, task: Task) -> dict[str, Any]:
        """Measure one case."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"case": case, "task": asdict(task)}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
            return
        self._process.kill()
        self._process.wait()


def make_task(workload: str, args: Any) -> Task:
    """Return the task of a workload; writes its shards or texts."""
    if workload in ROWS:
        # Not at the top: processes that a peer spawns would import it, too.
        import text_sets

        raw, count = text_sets.write(args.data, args.num_samples), text_sets.NUM_ROWS
    else:
        raw = workloads.write(workload, args.data, None, args.num_samples)
        count = workloads.NUM_SAMPLES[workload]
    count = args.num_samples or count
    return Task(
        workload=workload,
        max_seq_len=args.max_seq_len or GRID[workload],
        batch_size=args.batch_size,
        num_samples=count,
        memory_samples=min(MEMORY_SAMPLES.get(workload, 0), count),
        seconds=args.seconds,
        raw=str(raw),
        data=str(args.data),
    )


class Results:
    """The answers, by workload, peer and case."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = {task.workload: task for task in tasks}
        self._answers: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        self._abouts: dict[str, dict[str, Any]] = {}

    def note(self, task: Task, child: Child, case: str, answer: dict[str, Any]) -> None:
        """Keep one answer."""
        self._abouts[child.name] = child.about
        self._answers.setdefault((task.workload, child.name, case), []).append(answer)

    def failed(self, task: Task, child: Child, case: str) -> bool:
        """Return whether a case failed before."""
        return any(
            "error" in each for each in self._answers.get((task.workload, child.name, case), [])
        )

    def _measured(self, key: tuple[str, str, str]) -> list[dict[str, Any]]:
        """Return the answers that count."""
        answers = self._answers.get(key, [])
        return [] if any("error" in answer for answer in answers) else answers[1:]

    def _median(self, key: tuple[str, str, str], seconds: str = "seconds") -> float | None:
        rates = [answer["tokens"] / answer[seconds] for answer in self._measured(key)]
        return statistics.median(rates) if rates else None

    def _ratios(self, key: tuple[str, str, str], workers: int) -> dict[str, float]:
        """Return a rate relative to those of StreamingDataset, or to the tokenizer alone."""
        workload, ending = key[0], f", {workers} workers" if workers else ""
        others = {
            "of_streaming": ("mosaicml", "read" + ending, "seconds"),
            "of_collator": ("mosaicml", "packing collator" + ending, "seconds"),
            "of_tokenizer": ("tokenizer_alone", "encode_batch", "cpu_s"),
        }
        ratios = {}
        for field, (name, case, seconds) in others.items():
            own, other = self._median(key, seconds), self._median((workload, name, case), seconds)
            if own and other:
                ratios[field] = round(own / other, 3 if seconds == "cpu_s" else 2)
        return ratios

    def _line(self, key: tuple[str, str, str], params: dict[str, Any]) -> dict[str, Any]:
        """Return the line of a case that was measured."""
        _, name, case = key
        kind, workers = params["kind"], params["workers"]
        answers = self._measured(key)
        versions = record.versions(record.PACKAGES) | self._abouts[name]["versions"]
        fields: dict[str, Any] = {"versions": versions} | answers[-1]["more"]
        if kind in ("read", "load", "texts"):
            fields |= self._ratios(key, workers)
        if kind in ("read", "load") and not workers:  # that of workers is not included
            seconds = [1e9 * each["cpu_s"] / each["tokens"] for each in answers]
            fields["cpu_s_per_billion_tokens"] = round(statistics.median(seconds), 2)
        if answers[-1]["slots"]:
            fields["fill"] = round(answers[-1]["tokens"] / answers[-1]["slots"], 4)
        bench, unit = f"{GROUPS.get(kind, 'peers')}/{ADAPTERS[name]}/{case}", "tokens/s"
        runs = [answer["tokens"] / answer["seconds"] for answer in answers]
        if kind == "texts":
            unit, runs = "tokens/CPU s", [each["tokens"] / each["cpu_s"] for each in answers]
        elif kind == "resume":
            unit, runs = "CPU s", [each["cpu_s"] for each in answers]
        return record.line(bench, unit, runs, params, **fields)

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for each case."""
        made = []
        for key, answers in self._answers.items():
            workload, name, case = key
            how = self._abouts[name]["cases"][case]
            task = {
                field: value
                for field, value in asdict(self._tasks[workload]).items()
                if field not in ("raw", "data")
            }
            params = task | {"kind": how["kind"], "workers": how["workers"]}
            if self._measured(key):
                made.append(self._line(key, params))
                continue
            why = next((answer["error"] for answer in answers if "error" in answer), "no run")
            bench = f"{GROUPS.get(how['kind'], 'peers')}/{ADAPTERS[name]}/{case}"
            made.append(record.skipped(bench, why, params))
        return made


def run(children: list[Child], tasks: list[Task], num_runs: int) -> Results:
    """Ask every child for every case in turn, with one extra round for the warm-up."""
    results, begin = Results(tasks), time.perf_counter()
    for number in range(num_runs + 1):
        print(f"round {number} after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        for task in tasks:
            for child in children:
                for case, how in child.about["cases"].items():
                    is_due = task.workload in how["of"] and not results.failed(task, child, case)
                    if is_due:
                        results.note(task, child, case, child.ask(case, task))
    return results


def main() -> None:
    """Print one line for each peer, case and workload."""
    parser = record.options(__doc__, runs=3)
    parser.add_argument("--workload", nargs="+", default=["web", "sft"], choices=list(GRID))
    parser.add_argument("--max-seq-len", type=int, help="by default one for each workload")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--peer", nargs="+", default=list(ADAPTERS), choices=list(ADAPTERS))
    parser.add_argument("--serve", help="of children: answer for this adapter")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    venv = Path(sys.prefix)
    notes = venv / "peers.json"
    missing = json.loads(notes.read_text()) if notes.exists() else {}
    tasks = [make_task(workload, args) for workload in args.workload]
    children = []
    for child in [Child(name, venv) for name in args.peer]:
        child.begin()
        if "error" in child.about:
            child.close()
            why = missing.get(ADAPTERS[child.name], child.about["error"])
            record.emit(record.skipped(f"peers/{ADAPTERS[child.name]}", why), args.out)
        else:
            children.append(child)
    for name in WITHOUT_ADAPTER:
        why = missing.get(name, "not installed")
        record.emit(record.skipped(f"peers/{name}", why), args.out)
    try:
        for result in run(children, tasks, args.runs).lines():
            record.emit(result, args.out)
    finally:
        for child in children:
            child.close()


if __name__ == "__main__":
    main()
