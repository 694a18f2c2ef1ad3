"""The demo: real text, written as streams, mixed, packed and reported.

::

    show ---> prepare      real text becomes streams

examples/demo trains a small model on its packs.
"""
