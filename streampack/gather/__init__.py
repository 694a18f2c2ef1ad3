"""The tokens of planned packs, and the prefetch of the shards that hold them.

In: packs as arrays of segments. Out: rows of int32 tokens, with labels and masks. May import `plan`
and every room before it. Only this room reads tokens of planned datasets.

Cost: one kernel call per group of batches; no Python code per sample.
"""
