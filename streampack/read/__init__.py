"""Read: fetch the tokens of planned packs; the only room that touches tokens."""

from streampack.read.gather import Gatherer, Rows

__all__ = ["Gatherer", "Rows"]
