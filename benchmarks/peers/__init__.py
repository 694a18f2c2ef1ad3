"""Peers of streampack, one adapter per file, measured on the same samples.

::

    CASES = {"name": Case(kind, work)}      work(task) -> Measured

An adapter imports its library at the top of the file, so a missing one fails with a clear error.
Conversions that have to come first (to shards of another format, or lists of ints) are not timed.

Cost: none.
"""
