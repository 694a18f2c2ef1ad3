"""The plots in docs/benchmarks.md, made from the same lines as its tables.

::

    bench-peers.png   tokens/s of everything that reads or loads, one bar each
    bench-pack.png    every packer: fill against samples/s
    bench-cost.png    planning against streams, lanes and devices
    bench-start.png   start-up and memory against samples

Cost: about two seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from results import Line, Results

__all__ = ["PLOTS"]

DOTS_PER_INCH = 120
OURS, OTHERS = "#0b6e4f", "#9aa5b1"
COUNTS = {"streams": "num_streams", "lanes": "num_lanes", "world": "num_devices"}


def _figure(width: float, height: float, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _name(line: Line) -> str:
    return " ".join(line["bench"].removeprefix("peers/").split("/"))


def plot_peers(results: Results, path: Path) -> bool:
    """Draw readers and loaders by rate; return whether there was anything to draw."""
    workloads = ("web", "sft")
    found = {
        workload: sorted(
            (
                line
                for line in results.group("peers/", workload=workload)
                if line["params"]["kind"] in ("read", "load")
            ),
            key=lambda line: line["median"],
        )
        for workload in workloads
    }
    if not any(found.values()):
        return False
    figure, axes = _figure(13, 1.2 + 0.27 * max(map(len, found.values())), len(workloads))
    for each, (workload, lines) in zip(axes, found.items(), strict=True):
        rates = [line["median"] / 1e6 for line in lines]
        colours = [OURS if "streampack" in line["bench"] else OTHERS for line in lines]
        bars = each.barh([_name(line) for line in lines], rates, color=colours)
        each.bar_label(bars, [f"{rate:,.3g}" for rate in rates], padding=3, fontsize=8)
        length = lines[0]["params"]["max_seq_len"] if lines else ""
        each.set(xscale="log", xlabel="million tokens a second", title=f"{workload} at {length}")
        each.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True


def plot_packers(results: Results, path: Path) -> bool:
    """Draw fill against speed of each packer; return whether there was anything to draw."""
    lines = list(results.group("pack/", workload="web", max_seq_len=8192))
    if not lines:
        return False
    figure, [axes] = _figure(8, 4.5, 1)
    for line in lines:
        empty = max(100 * (1 - line["fill"]), 1e-4)
        axes.scatter(line["median"], empty, color=OURS, zorder=3)
        name = line["bench"].removeprefix("pack/")
        axes.annotate(name, (line["median"], empty), xytext=(5, 5), textcoords="offset points")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="samples a second, one core",
        ylabel="% of slots that stay empty (least shown: 0.0001)",
        title="packers on web lengths, packs of 8,192",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True


def plot_cost(results: Results, path: Path) -> bool:
    """Draw planning against three counts; return whether there was anything to draw."""
    found = {name: list(results.group(f"plan/{name}")) for name in COUNTS}
    found = {name: lines for name, lines in found.items() if lines}
    if not found:
        return False
    figure, axes = _figure(4 * len(found), 3.6, len(found))
    for each, (name, lines) in zip(axes, found.items(), strict=True):
        counts = [line["params"][COUNTS[name]] for line in lines]
        each.plot(counts, [line["median"] for line in lines], "o-", color=OURS)
        for count, line in zip(counts, lines, strict=True):
            each.errorbar(count, line["median"], _spread(line), color=OURS, capsize=3)
        each.set(xscale="log", xlabel=COUNTS[name].removeprefix("num_"), ylabel="ns a sample")
        each.set_ylim(0)
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True


def _spread(line: Line) -> list[list[float]]:
    middle = statistics.median(line["runs"])
    return [[middle - min(line["runs"])], [max(line["runs"]) - middle]]


def plot_start(results: Results, path: Path) -> bool:
    """Draw seconds and memory against samples; return whether there was anything to draw."""
    found = {name: list(results.group(f"start/{name}")) for name in ("streampack", "mosaicml")}
    if not found["streampack"]:
        return False
    figure, axes = _figure(10, 3.6, 2)
    for name, lines in found.items():
        colour = OURS if name == "streampack" else OTHERS
        lines.sort(key=lambda line: line["params"]["num_samples"])
        counts = [line["params"]["num_samples"] for line in lines]
        axes[0].plot(counts, [li["median"] for li in lines], "o-", color=colour, label=name)
        axes[1].plot(counts, [li["peak_mib"] for li in lines], "o-", color=colour, label=name)
    for each, label in zip(axes, ("s to the first batch", "MiB at the peak"), strict=True):
        each.set(xscale="log", yscale="log", xlabel="samples", ylabel=label)
        each.grid(alpha=0.3)
        each.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return True


PLOTS: dict[str, Callable[[Results, Path], bool]] = {
    "bench-peers.png": plot_peers,
    "bench-pack.png": plot_packers,
    "bench-cost.png": plot_cost,
    "bench-start.png": plot_start,
}
