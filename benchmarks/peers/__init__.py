"""Peers of streampack, one adapter a file: what each makes of the same samples.

::

    CASES = {"name": Case(kind, work)}      work(task) -> Measured

An adapter imports its library at its top, so that one that is not installed says so by itself. What
it must convert first (shards of another format, lists of ints) is not timed.

Cost: none.
"""
