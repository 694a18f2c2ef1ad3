"""Every bench runs on tiny data and prints complete result lines, which the report reads."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "bench_batch": ["--workload", "web", "--max-seq-len", "512", "--num-samples", "300"],
    "bench_compat": ["--num-samples", "100", "--max-seq-len", "512"],
    "bench_inputs": ["--megabytes", "0.05"],
    "bench_limits": ["--megabytes", "4", "--num-samples", "300"],
    "bench_loader": [
        *["--workload", "web", "--max-seq-len", "512", "--num-samples", "300"],
        *["--seconds", "0.05", "--way", "dataset"],
    ],
    "bench_pack": ["--workload", "web", "--max-seq-len", "512", "--num-samples", "300"],
    "bench_peers": [
        *["--workload", "web", "--max-seq-len", "512", "--num-samples", "300"],
        *["--seconds", "0.05", "--peer", "llamafactory_knapsack"],
    ],
    "bench_plan": ["--num-samples", "2000", "--case", "web", "streams", "lanes", "tiny"],
}
PROCESSES = {  # these start new processes, which import everything
    "bench_loader": [
        *["--workload", "sft", "--max-seq-len", "512", "--num-samples", "3000"],
        *["--seconds", "0.05", "--way", "workers_1"],
    ],
    "bench_peers": [
        *["--workload", "jsonl", "--num-samples", "60"],
        *["--peer", "tokenizer_alone", "streampack_texts", "zephon_pipeline"],
    ],
    "bench_process": ["--num-samples", "2000"],
    "bench_start": ["--samples", "40000"],
    "bench_tokenize": ["--megabytes", "0.2"],
    "bench_write": ["--megabytes", "0.2"],
}
FIELDS = {"bench", "params", "versions", "commit", "machine"}
NUM_RUNS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        import_module(name).main()

    return run


def lines_of(path: Path) -> list[dict]:
    return [json.loads(row) for row in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *TINY.items(),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in PROCESSES.items()),
    ],
)
def test_a_bench_prints_lines_that_say_all_they_depend_on(name, arguments, bench, data, capsys):
    out = data / f"{name}.jsonl"
    out.unlink(missing_ok=True)

    bench(name, *arguments, "--runs", str(NUM_RUNS), "--data", str(data), "--out", str(out))

    lines = lines_of(out)
    assert [json.loads(row) for row in capsys.readouterr().out.splitlines()] == lines
    measured = [line for line in lines if "skipped" not in line]
    assert measured
    for line in lines:
        assert line.keys() >= FIELDS
        assert str(data) not in json.dumps(line), "a line names a place on this machine"
        assert "+" not in line["versions"]["torch"]
    for line in measured:
        assert line["params"]
        assert len(line["runs"]) == NUM_RUNS
        assert min(line["runs"]) > 0
        assert line["median"] == pytest.approx(statistics.median(line["runs"]), rel=1e-5)
        assert 0 < line.get("fill", 1) <= 1
    keys = [json.dumps([line["bench"], line["params"]]) for line in lines]
    assert len(set(keys)) == len(keys), "two lines of the same bench and parameters"


def test_the_report_fills_in_every_section_it_has_lines_for_and_no_other(bench, data, tmp_path):
    files = [path for path in sorted(data.glob("*.jsonl")) if "start" not in path.name]
    assert len(files) == len(TINY)
    written = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(written.replace("<!-- start -->", "<!-- start --> as it was"))

    bench("report", *map(str, files), "--page", str(page))

    text = page.read_text()
    sections = import_module("report").SECTIONS
    assert "<!-- start --> as it was" in text
    for name in sections.keys() - {"start"}:
        inside = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
        assert inside.strip(), name
    for line in lines_of(data / "bench_pack.jsonl"):
        assert f"| {line['bench'].removeprefix('pack/')} |" in text
    assert (tmp_path / "images" / "bench-cost.png").stat().st_size > 1000


BURN = "import time\nwhile time.process_time() < {}: pass\n"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_processes_that_run_and_those_that_ended_count_as_processor_seconds(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    meter, own = import_module("peers.texts").Meter(), time.process_time()

    def of_others() -> float:
        return meter.stop()["cpu_s"] - (time.process_time() - own)

    subprocess.run([sys.executable, "-Sc", BURN.format(0.2)], check=True)
    ended = of_others()
    assert ended >= 0.15  # in ticks of 10 ms

    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-Sc', {BURN.format(9)!r}])"
    running = subprocess.Popen([sys.executable, "-Sc", nested], start_new_session=True)
    deadline = time.monotonic() + 30
    while of_others() < ended + 0.3 and time.monotonic() < deadline:
        time.sleep(0.05)
    grown = of_others() - ended
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert grown >= 0.3


def test_texts_are_compared_with_the_best_of_zephon(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    results, targets = import_module("results"), import_module("targets")
    params = {"workload": "jsonl", "kind": "texts"}
    seconds = {"bench": "texts/zephon/wrap, half the ranks", "median": 9.0}
    resumed = seconds | {"params": params | {"kind": "resume"}}
    zephon = {"wrap": (3.0, 4.0), "best_fit": (3.0, 5.0)}  # the whole pass, and without the start
    lines = [
        {"bench": f"texts/zephon/{name}", "median": whole, "tokens_per_cpu_s_after": after}
        for name, (whole, after) in zephon.items()
    ]
    lines.append({"bench": "texts/streampack/planned", "median": 8.0, "of_tokenizer": 0.9})

    lines = [line | {"params": params} for line in lines]
    rows = targets.rows(results.Results([*lines, resumed]))

    assert [row[2:] for row in rows if "texts of jsonl" in row[0]] == [
        ["90 %", "yes"],
        ["1.60x", "yes"],
    ]


def test_batches_and_the_load_of_a_state_take_few_calls_and_changes_of_room():
    # In a process of its own: in this one, other tests may have filled the pool of open shards.
    count = [sys.executable, BENCHMARKS / "count_calls.py"]
    printed = subprocess.run(count, capture_output=True, text=True, check=True).stdout

    rows = [line.replace(",", "").rsplit(maxsplit=5) for line in printed.split("\n")]
    counts = {name: list(map(int, numbers)) for name, *numbers in filter(None, rows[1:])}
    *_, calls, _, changes = counts["planned: first batch"]
    assert calls <= 550
    assert changes <= 130
    assert counts["planned: steady batch"][2] <= 90
    assert counts["online: first batch"][2] <= 500
    assert counts["online: steady batch"][2] <= 80
    assert counts["online: state_dict"][2] <= 300
    assert counts["online: load_state_dict"][2] <= 300
    files, _, calls, *_ = counts["planned: load chapters"]
    assert files <= 41
    assert calls <= 870
