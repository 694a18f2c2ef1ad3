"""The MDS file format: index.json, shard headers and columns, length files, and new shards.

In: bytes of files that the caller has read or mapped, or samples. Out: `MdsIndex`, positions of
samples in a shard, lengths, or bytes of shards. May import the ground only. It uses no network and
no cache.

Cost: parsing an index takes about 20 us a shard; positions of samples are one pass over a header.
"""
