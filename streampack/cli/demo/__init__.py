"""The demo: what ``make demo`` shows, a file for each thing that happens.

::

    command ---> text --> prepare      real text becomes streams
           '---> crash --> train       a process that trains `model`, and is killed
"""
