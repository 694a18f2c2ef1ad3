"""Which segments are in which pack of which step: integers only, the same in every process.

In: lengths, weights, a seed and a world. Out: the packs of a device's next batches, the shards they
need, and the state of a run. May import `pack`, `order` and `mix`. No file is opened here: lengths
come from a callable that the caller provides.

Cost: about 0.4 us a sample, regardless of the number of streams and lanes.
"""
