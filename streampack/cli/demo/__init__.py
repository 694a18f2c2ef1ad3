"""The demo of ``make demo``, with a module for each step.

::

    command ---> text --> prepare      real text becomes streams
           '---> crash --> train       a process that trains `model`, and is killed
"""
