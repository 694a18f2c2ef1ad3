"""The configuration classes, one per question. Each validates its values on construction.

::

    Packing     how samples share packs           Bucketing   how padded samples share batches
    Mixing      how many of each stream, and in   Order       which sample comes next
                which batches                     Buffers     how much may be in memory or cached
    HeldOut     which side of a split             Download    how files are fetched and verified

All classes are frozen and allocate nothing. The command line reads the same classes from YAML. A
count may be any integral value (10_000, 1e4, np.int64(10_000)) and is stored as an int.
"""

from streampack.config.bucketing import Bucketing
from streampack.config.buffers import Buffers
from streampack.config.download import Download
from streampack.config.held_out import HeldOut
from streampack.config.mixing import Mixing
from streampack.config.order import Order
from streampack.config.packing import PackCost, Packing

__all__ = ["Bucketing", "Buffers", "Download", "HeldOut", "Mixing", "Order", "PackCost", "Packing"]
