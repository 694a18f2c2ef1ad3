"""Which samples share a pack: segments in, packs out, by their lengths alone."""

from streampack.pack.overflow import count_long, fit_samples
from streampack.pack.packer import Packer, make_packer

__all__ = ["Packer", "count_long", "fit_samples", "make_packer"]
