"""`PackedDataLoader`, the single loader for both kinds of dataset: planned and online.

In: a dataset of either kind, and torch's options. Out: batches, states and statistics. May import
every room.

Cost: see `runtime`.
"""
