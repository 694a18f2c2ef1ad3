"""The demo of ``make demo``.

::

    show ---> prepare      real text becomes streams
         '--> train        a process that trains a small model, and is killed
         '--> chapters     a run that is killed, edited and resumed
"""
