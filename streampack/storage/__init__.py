"""A shard on this node: fetched, verified and decompressed, or an error.

In: a stream's location and its index. Out: paths and mapped bytes of complete files. May import
`mds`. This package knows nothing of tokens, weights or plans. A file gets its final name only when
it is complete, so a killed process leaves nothing that could be mistaken for a shard.

Cost: one copy of each shard per node; one `stat` for each shard that a process opens.
"""
