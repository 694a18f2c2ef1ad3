"""Write the tables and plots of docs/benchmarks.md from JSON lines.

::

    python benchmarks/report.py build/bench/*.jsonl

    lines --> tables --> between the markers <!-- name --> and <!-- /name -->
          '-> plots  --> docs/images/bench-*.png

Text outside the markers is written by hand and stays, and so does any section without new lines.
The table of targets is also printed.

Cost: about five seconds.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import targets
from plots import PLOTS
from results import Line, Results

HOME = Path(__file__).resolve().parent.parent
PAGE = HOME / "docs" / "benchmarks.md"
AFTER = "tokens_per_cpu_s_after"


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of Markdown; columns after the first are set to the right.

    >>> print(table(["a", "b"], [["x", 1]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = [f"| {' | '.join(headers)} |", "|---|" + "---:|" * (len(headers) - 1)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def millions(value: float) -> str:
    """Return a rate in millions.

    >>> millions(123_456_789), millions(1_234_567)
    ('123', '1.23')
    """
    return f"{value / 1e6:,.0f}" if value >= 1e8 else f"{value / 1e6:,.3g}"


def _range(line: Line) -> str:
    low, high = (millions(value) for value in (min(line["runs"]), max(line["runs"])))
    return f"{low} - {high}"


def machine(results: Results) -> str:
    """Where and with what the lines were measured."""
    rows = []
    for line in results.lines:
        where = line["machine"]
        rows.append(
            f"{where['cpu']}, {where['cpus']} cores, {where['memory_gib']} GiB, {where['system']}"
        )
    most = [name for name, _ in Counter(rows).most_common()]
    versions: dict[str, str] = {}
    for line in results.lines:
        versions |= line["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    commits = ", ".join(sorted({line["commit"] for line in results.lines}))
    return f"Machine: {'; '.join(most)}.\n\n" + textwrap.fill(f"Commit {commits}; {named}.", 100)


def must_hold(results: Results) -> str:
    """The targets, and whether they are met."""
    return table(["what", "target", "measured", "met"], targets.rows(results))


def limits(results: Results) -> str:
    """What the machine allows."""
    rows = [
        [
            line["bench"].removeprefix("limits/"),
            line["params"]["workload"],
            f"{line['median']:.3g}",
            f"{min(line['runs']):.3g} - {max(line['runs']):.3g}",
        ]
        for line in results.group("limits/")
    ]
    return table(["limit", "of", "GB/s", "runs"], rows)


def pack(results: Results) -> str:
    """Packing only."""
    headers = ["lengths", "pack", "packer", "Msamples/s", "fill %", "samples cut %", "wait mean"]
    rows = [
        [
            line["params"]["workload"],
            f"{line['params']['max_seq_len']:,}",
            line["bench"].removeprefix("pack/"),
            millions(line["median"]),
            f"{100 * line['fill']:.3f}",
            f"{100 * line['samples_cut']:.2f}",
            f"{line['wait_packs']['mean']:.1f}",
            f"{line['wait_packs']['p99']:.0f}",
        ]
        for line in results.group("pack/")
    ]
    return table([*headers, "p99"], rows)


def plan(results: Results) -> str:
    """Planning."""
    headers = ["case", "lengths", "pack", "streams", "lanes", "devices", "what", "ns/sample"]
    rows = []
    for line in results.group("plan/"):
        params = line["params"]
        what = [str(params[key]) for key in ("batching_method", "weight_unit") if key in params]
        what += [] if params["packs"] else ["order and mixing alone"]
        what += [f"with a stream of {params['tiny']}"] if params.get("tiny") else []
        what += [f"blocks of {params['block_size']}"] if params.get("block_size") else []
        rows.append(
            [
                line["bench"].removeprefix("plan/"),
                params["workload"],
                f"{params['max_seq_len']:,}",
                params["num_streams"],
                params["num_lanes"],
                params["num_devices"],
                ", ".join(what),
                f"{line['median']:,.0f}",
                f"{100 * line['fill']:.3f}",
                line["lanes_planned"],
            ]
        )
    return table([*headers, "fill %", "lanes planned"], rows)


def batch(results: Results) -> str:
    """Gather and assemble."""
    rows = [
        [
            line["bench"].removeprefix("batch/"),
            f"{line['params']['workload']} at {line['params']['max_seq_len']:,}",
            millions(line["median"]),
            _range(line),
            f"{100 * line['ratio']:.0f}",
        ]
        for line in results.group("batch/")
    ]
    return table(["part", "lengths", "Mtok/s", "runs", "% of the copy"], rows)


def loader(results: Results) -> str:
    """End to end."""
    headers = ["way", "lengths", "batches", "Mtok/s", "runs", "of threads", "of fresh writing"]
    rows = []
    for line in results.group("loader/"):
        if line["unit"] != "tokens/s":
            continue
        params = line["params"]
        unpacking = line.get("of_decompression")
        rows.append(
            [
                line["bench"].removeprefix("loader/"),
                f"{params['workload']} at {params['max_seq_len']:,}",
                params["batch_format"],
                millions(line["median"]),
                _range(line),
                f"{line['of_threads']:.2f}",
                f"{100 * line['of_fresh_write']:.0f} %",
                "" if unpacking is None else f"{100 * unpacking:.0f} %",
                f"{line['cpu_s_per_billion_tokens']:.1f}",
                f"{1000 * line['first_batch_s']:.0f}",
            ]
        )
    more = ["of decompression", "CPU s / 10^9 tokens", "first batch ms"]
    return table(headers + more, rows)


def start(results: Results) -> str:
    """Start-up."""
    rows = [
        [
            line["bench"].removeprefix("start/"),
            f"{line['params']['num_samples']:,}",
            f"{line['constructor_s']:.2f}",
            f"{line['median']:.2f}",
            f"{line['peak_mib']:,.0f}",
        ]
        for line in results.group("start/")
    ]
    headers = ["what", "samples", "constructor s", "first batch s", "peak MiB"]
    return table(headers, sorted(rows, key=lambda row: int(row[1].replace(",", ""))))


def peers(results: Results) -> str:
    """Peers on the same samples."""
    headers = ["peer", "way", "kind", "workers", "lengths", "Mtok/s", "runs", "fill %"]
    rows = []
    for line in results.group("peers/"):
        params = line["params"]
        _, name, case = line["bench"].split("/", 2)
        streaming, collator = line.get("of_streaming"), line.get("of_collator")
        rows.append(
            [
                name,
                case,
                params["kind"],
                params["workers"],
                f"{params['workload']} at {params['max_seq_len']:,}",
                millions(line["median"]),
                _range(line),
                f"{100 * line['fill']:.2f}" if "fill" in line else "",
                line.get("cpu_s_per_billion_tokens", ""),
                "" if streaming is None else f"{streaming:,.3g}",
                "" if collator is None else f"{collator:,.3g}",
            ]
        )
    more = ["CPU s / 10^9 tokens", "x StreamingDataset", "x its collator"]
    text = table(headers + more, rows)
    left_out = [f"* {line['bench']}: {line['skipped']}" for line in results.skipped()]
    return "\n".join([text, "", "Left out:", "", *left_out] if left_out else [text])


def texts(results: Results) -> str:
    """Texts and lists of token ids, by processor seconds of the whole process tree."""
    rows = []
    for line in results.group("texts/"):
        _, name, case = line["bench"].split("/", 2)
        of_tokenizer, apart = line.get("of_tokenizer"), line.get("deviation")
        is_resume = line["params"]["kind"] == "resume"
        rows.append(
            [
                name,
                case,
                f"{line['params']['workload']} at {line['params']['max_seq_len']:,}",
                "" if is_resume else millions(line["median"]),
                "" if is_resume else _range(line),
                "" if of_tokenizer is None else f"{100 * of_tokenizer:.0f} %",
                millions(line[AFTER]) if AFTER in line else "",
                f"{line['median']:.2f}" if is_resume else line.get("first_batch_cpu_s", ""),
                f"{100 * line['fill']:.2f}" if "fill" in line else "",
                "" if apart is None else f"{100 * apart['max']:.2f}",
                f"{line['state_bytes']:,}" if "state_bytes" in line else "",
            ]
        )
    headers = ["what", "way", "files", "Mtok / CPU s", "runs", "of the tokenizer alone"]
    more = ["after the first batch", "CPU s to it", "fill %", "off the mixture, points"]
    return table([*headers, *more, "bytes of state"], rows)


def compat(results: Results) -> str:
    """The classes of streampack.compat and the originals they replace."""
    rows = []
    for line in results.group("compat/"):
        _, library, whose, what = line["bench"].split("/")
        spread = f"{min(line['runs']):.3g} - {max(line['runs']):.3g}"
        rows.append([library, whose, what.replace("_", " "), f"{line['median']:.3g}", spread])
    return table(["class of", "whose", "what", "s", "runs"], rows)


SECTIONS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "machine": ("", machine),
    "targets": ("", must_hold),
    "limits": ("limits/", limits),
    "pack": ("pack/", pack),
    "plan": ("plan/", plan),
    "batch": ("batch/", batch),
    "loader": ("loader/", loader),
    "start": ("start/", start),
    "peers": ("peers/", peers),
    "texts": ("texts/", texts),
    "compat": ("compat/", compat),
}


def fill_in(page: str, name: str, text: str) -> str:
    """Return a page with a section's text between its markers.

    >>> fill_in("a <!-- x -->old<!-- /x --> b", "x", "new")
    'a <!-- x -->\\n\\nnew\\n\\n<!-- /x --> b'
    """
    pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n\n{text}\n\n{found[2]}", page)


def main() -> None:
    """Rewrite the page's sections and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill in")
    args = parser.parse_args()
    results = Results.read(args.lines)
    if not results.lines:
        sys.exit(f"no line in {', '.join(map(str, args.lines))}; run `make bench` first")
    page = args.page.read_text()
    for name, (prefix, write) in SECTIONS.items():
        if any(results.group(prefix)):
            page = fill_in(page, name, write(results))
    args.page.write_text(page)
    images = args.page.parent / "images"
    images.mkdir(exist_ok=True)
    for name, plot in PLOTS.items():
        plot(results, images / name)
    print(must_hold(results))


if __name__ == "__main__":
    main()
