"""How many samples of each stream an epoch takes, and which stream serves a slot.

In: weights and sizes of streams. Out: quotas, schedules and draws, as integers. May import only the
top-level modules. Pure functions: equal arguments give equal results in every process.

Cost: O(streams) for weights; about 10 ns a draw.
"""
