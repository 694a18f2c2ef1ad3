"""Shared by planned and online loading: worker processes, threads, epochs, memory, statistics.

In: a function that makes batches, and options. Out: batches in order, from threads or processes,
within the bounds of `Buffers`. May import `batch` and every room before it, but neither `planned`
nor `online`.

Cost: about 30 us to transfer a group of batches from a thread, 200 us from a worker.
"""
