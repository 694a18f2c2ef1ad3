"""Packs as a picture: one bar per pack, one colour per stream, white for padding.

Cost: about a second for 32 packs, most of it matplotlib's first figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streampack._extras import import_extra
from streampack.report.bars import Bar, colour

INCHES_PER_PACK = 0.24
DOTS_PER_INCH = 120
PICTURE = ("plots", "a picture")  # the extra, and what needs it


def plot_packs(bars: Sequence[Bar], path: Path, *, names: Sequence[str], row_tokens: int) -> None:
    """Write a PNG of packs, the first one on top, coloured by stream; `names` are by number.

    Raises a ConfigError where matplotlib is not installed.
    """
    figure = make_figure(height=1.4 + INCHES_PER_PACK * len(bars))
    axes = figure.add_subplot()
    for pack, bar in enumerate(bars):
        streams, lengths = bar.T
        axes.barh(
            pack,
            lengths,
            left=np.cumsum(lengths) - lengths,
            height=0.86,
            color=[colour(stream) for stream in streams.tolist()],
            edgecolor="white",
            linewidth=0.6,
        )
    axes.set(
        xlim=(0, row_tokens), ylim=(max(len(bars), 1) - 0.5, -0.5), xlabel="token", ylabel="pack"
    )
    axes.set_title(f"{len(bars)} packs of {row_tokens:,} tokens", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    patch = import_extra("matplotlib.patches", *PICTURE).Patch
    handles = [patch(color=colour(number), label=name) for number, name in enumerate(names)]
    save_figure(figure, path, legend=handles)


def make_figure(height: float) -> Any:
    """Return an empty figure of matplotlib, of a height in inches."""
    # No pyplot: it keeps every figure alive, and selects a backend for the whole process.
    figure = import_extra("matplotlib.figure", *PICTURE).Figure(
        figsize=(11, height), layout="constrained"
    )
    import_extra("matplotlib.backends.backend_agg", *PICTURE).FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path, *, legend: Sequence[Any]) -> None:
    """Write a figure in the format that the path's suffix names; PNG without one."""
    figure.legend(handles=legend, loc="outside lower center", ncols=min(len(legend), 6))
    # Written under a temporary name and renamed, so that a full disk leaves no broken picture.
    part = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(part, dpi=DOTS_PER_INCH, format=path.suffix[1:] or "png")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
