"""Token files of other programs: token ids back to back, and a table of where documents end.

In: the files of Megatron, OLMo, datatrove or Arrow on this disk, by name. Out: a `TokenFile` for
each, with the begins and lengths of its documents, and its virtual shards. May import `mds` and
`storage`. Nothing is fetched here, and no token is read.

Cost: opening a file reads its header and, by bisection, about thirty entries a virtual shard.
"""
