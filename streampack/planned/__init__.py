"""The planned dataset: MDS streams with packs that follow from sample lengths, in any world.

In: `Stream` objects and configs. Out: batches of `PackedStreamingDataset`, and states that resume
in any world. May import `runtime` and every room before it, never `online`.

Cost: about 0.4 us per sample for planning; see `gather` and `batch` for the rest.
"""
