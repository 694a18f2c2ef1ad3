"""Charts with matplotlib in one style, as SVG whose colours are those of a page: light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack._extras import import_extra
from streampack.report.bars import PALETTE

INK, MUTED, GRID, BAND, SURFACE = "#1c1b1a", "#6b6a66", "#e3e2dd", "#f1f0ec", "#fcfcfb"
SERIES = ("#4b5b76", "#a3aebf", "#d3d9e2")  # of charts without streams
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAND: "band", SURFACE: "surface"}
VARIABLES |= {colour: f"s{number}" for number, colour in enumerate(PALETTE)}
VARIABLES |= {colour: f"g{number}" for number, colour in enumerate(SERIES)}
PLOTS = ("plots", "a report")  # the extra, and what needs it
FULL, HALF = 1040, 500  # pixels of a chart on the page, and of one of two in a row
SIZE = 12  # of text, in pixels: one point of matplotlib is one pixel on the page
MOST_BINS = 100
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def new_figure(width: int, height: float, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Return a figure of matplotlib, sizes in pixels, and its axes, shape (rows, columns).

    Raises a ConfigError where matplotlib is not installed.
    """
    # No pyplot: it keeps every figure alive, and selects a backend for the whole process.
    make = import_extra("matplotlib.figure", *PLOTS).Figure
    figure = make(figsize=(width / 72, height / 72), layout="constrained", facecolor="none")
    import_extra("matplotlib.backends.backend_agg", *PLOTS).FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.04, hspace=0.05, wspace=0.04)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for each in axes.flat:
        each.set_facecolor("none")
        each.spines[["top", "right", "left"]].set_visible(False)
        each.spines["bottom"].set_color(GRID)
        each.tick_params(colors=MUTED, labelsize=SIZE, length=0, pad=6)
        each.grid(axis="y", color=GRID, linewidth=1)
        each.set_axisbelow(True)
    return figure, axes


def label(axes: Any, x: str = "", y: str = "") -> None:
    """Name the axes: x below at the right, y above at the left, where it can be read."""
    axes.set_xlabel(x, color=MUTED, fontsize=SIZE, loc="right")
    axes.set_title(y, color=MUTED, fontsize=SIZE, loc="left", pad=8)


def note(axes: Any, text: str, at: Any, offset: Any, *, axis: str = "", **options: Any) -> None:
    """Write a text `offset` pixels from a place: in data, or of only one `axis` in data."""
    coordinates: Any = [("data" if axis in ("", each) else "axes fraction") for each in "xy"]
    options |= {"xycoords": tuple(coordinates), "textcoords": "offset points"}
    axes.annotate(text, at, offset, color=MUTED, fontsize=SIZE, **options)


def bars(
    width: int, lines: Sequence[Any], most: float | None = None, least: Sequence[float] = ()
) -> Any:
    """Return a figure with a bar for each (name, parts, text), and its axes.

    Parts are (value, colour, hatch). A text follows its bar, or `least` where that is further.
    """
    figure, axes = new_figure(width, 30 + 44 * max(len(lines), 2))
    axes, ends = axes[0, 0], list(least) or [0.0] * len(lines)
    axes.grid(visible=False)
    for number, (_, parts, text) in enumerate(lines):
        left = 0.0
        for value, colour, hatch in parts:
            axes.barh(number, value, 0.52, left, color=colour, hatch=hatch, ec=SURFACE, lw=1)
            left += value
        ends[number] = max(ends[number], left)
        note(axes, text, (ends[number], number), (12, 0), va="center")
    axes.set(xticks=[], ylim=(max(len(lines), 2) - 0.4, -0.6))
    axes.set_xlim(0, (most or 1.4 * max(ends)) or 1)
    axes.set_yticks(range(len(lines)), [line[0] for line in lines], color=INK, fontsize=SIZE + 1)
    axes.spines["bottom"].set_visible(False)
    return figure, axes


def step_lines(width: int, series: Sequence[Any], colours: Sequence[str]) -> Any:
    """Return a figure with a line for each of several values by step, and its axes."""
    figure, axes = new_figure(width, 240)
    axes, num = axes[0, 0], len(series[0])
    starts = np.unique(np.linspace(0, num, min(num, MOST_BINS) + 1).astype(int))
    for values, colour in zip(series, colours, strict=True):
        means = np.add.reduceat(values, starts[:-1]) / np.diff(starts)
        axes.plot(starts[:-1], means, color=colour, lw=2, marker="o" if num == 1 else "")
    axes.set_xlim(0, max(int(starts[-2]), 1))
    short_ticks(axes.xaxis)
    label(axes, x="step")
    return figure, axes


def shown(number: float) -> str:
    """Return a number in short.

    >>> shown(1_250_000), shown(37), shown(1e12), shown(0.25)
    ('1.25M', '37', '1T', '0.25')
    """
    for size, unit in UNITS:
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def short_ticks(axis: Any) -> None:
    """Let an axis have few ticks, with short numbers."""
    ticker = import_extra("matplotlib.ticker", *PLOTS)
    axis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: shown(value)))


def as_svg(figure: Any, key: str, text: str, titles: Mapping[str, str]) -> str:
    """Return a figure as SVG to put into HTML.

    `key` makes its ids unique on the page, `text` is its text alternative. Patches with a gid in
    `titles` show that title when the pointer is over them.
    """
    written, rc = io.StringIO(), {"svg.fonttype": "none", "svg.hashsalt": key}
    # The text between two dollar signs, as in names of streams, would be a formula.
    for each in figure.findobj(import_extra("matplotlib.text", *PLOTS).Text):
        each.set_parse_math(False)
    with import_extra("matplotlib", *PLOTS).rc_context(rc):
        figure.savefig(written, format="svg", metadata={"Date": None})
    # Metadata and a style for the whole page come first.
    head, _, body = written.getvalue().partition("</defs>")
    for gid, title in titles.items():
        body = body.replace(f'<g id="{gid}">', f"<g><title>{title}</title>", 1)
    body = re.sub(r' id="[a-z_]+[a-z0-9_.]*_\d+"', "", body)  # of groups: nothing refers to them
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", body)
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), body)
    body = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    for colour, name in VARIABLES.items():
        body = body.replace(colour, f"var(--{name})")
    box = head.partition('viewBox="')[2].partition('"')[0]
    return f'<svg viewBox="{box}" role="img" aria-label="{text}">{body}'
