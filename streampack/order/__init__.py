"""Which sample is next, per lane: dealing, shuffling and drawing, all by the seed."""

from streampack.order.draw import draw_by_tokens, draw_places, drawn_before
from streampack.order.lanes import Extents, deal, run_of_lane
from streampack.order.shuffle import Lengths, Passes, Taken

__all__ = [
    "Extents",
    "Lengths",
    "Passes",
    "Taken",
    "deal",
    "draw_by_tokens",
    "draw_places",
    "drawn_before",
    "run_of_lane",
]
