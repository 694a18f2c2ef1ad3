"""Which samples share a pack.

In: segments and their lengths. Out: packs, as arrays of segments. May import `mix` and `order`. A
packer sees lengths, never tokens. Its buffer is bounded by `buffer_tokens` and `buffer_samples`.

Cost: 100 to 300 ns a sample, depending on the packer.
"""

from streampack.pack.overflow import count_dropped, fit_samples
from streampack.pack.packer import make_packer

__all__ = ["count_dropped", "fit_samples", "make_packer"]
