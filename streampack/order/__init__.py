"""Which sample of a stream comes next in a lane.

In: a seed, a stream's size and shards, a lane. Out: sample numbers, a pure function of position.
May import `mix`. No sample is read. Lengths are needed only where tokens are counted.

Cost: about 10 ns a sample. Memory: one shuffle block per lane.
"""
