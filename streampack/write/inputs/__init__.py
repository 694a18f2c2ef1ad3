"""inputs: list, split and read the files of `streampack write`.

::

    paths, URLs --list_inputs--> files --split_inputs--> slices --read_rows--> batches

Uses the stores room for URLs, and the write room's names. A slice is read by any process, on any
machine that reaches its file. Start with `slices.py`.
"""
