"""The picture of packs: the colours on the page are in the proportion of the tokens."""

from __future__ import annotations

import subprocess
import sys

import matplotlib.image
import numpy as np

from streampack.report import colour, plot_packs


def share_of(image, code):
    """Return the part of a picture's pixels that have a colour."""
    wanted = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)])
    return float((np.abs(image[..., :3] * 255 - wanted).max(axis=-1) < 2).mean())


def test_a_picture_shows_each_stream_in_proportion_to_its_tokens(tmp_path):
    bars = [np.array([[0, 600], [1, 200]]), np.array([[1, 200], [0, 600]])] * 4
    path = tmp_path / "packs.png"

    plot_packs(bars, path, names=["code", "docs"], row_tokens=1000)

    image = matplotlib.image.imread(path)
    ratio = share_of(image, colour(0)) / share_of(image, colour(1))
    assert 2.6 < ratio < 3.4


def test_more_packs_make_a_taller_picture_of_the_same_width(tmp_path):
    shapes = []
    for num_packs in (0, 1, 32):
        path = tmp_path / f"{num_packs}.png"
        plot_packs([np.array([[0, 5]])] * num_packs, path, names=["code"], row_tokens=8)
        shapes.append(matplotlib.image.imread(path).shape[:2])

    assert shapes[0][0] < shapes[1][0] < shapes[2][0]
    assert len({width for _, width in shapes}) == 1


def test_drawing_leaves_pyplot_and_its_global_figures_alone(tmp_path):
    code = (
        "import sys, pathlib, numpy as np; from streampack.report import plot_packs; "
        f"plot_packs([np.array([[0, 5]])], pathlib.Path({str(tmp_path / 'p.png')!r}), "
        "names=['code'], row_tokens=8); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
