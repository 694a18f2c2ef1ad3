"""inputs: list and read the files of rows.

::

    paths, URLs --list_inputs--> files --units.py--> slices --read_rows--> batches

Uses the stores room for URLs. A slice is read by any process, on any
machine that reaches its file. Start with `slices.py`.
"""
