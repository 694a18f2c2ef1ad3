"""Checks for your own tests of a model, a `Stream`, a packer or a batch format.

::

    leaks    model + batch     do tokens attend to those of other samples?
    runs     loaders           exact resume, each sample once, the same packs in every world
    formats  token files       documents as they were written, parts, resume, damage
    shown    batches           as plain values, so that they can be compared

streampack's own tests use the same functions.
"""

from streampack.testing.formats import assert_format
from streampack.testing.leaks import InconclusiveError, LogitsOf, assert_no_leak
from streampack.testing.runs import (
    assert_exactly_once,
    assert_resumes,
    assert_same_in_every_world,
)

__all__ = [
    "InconclusiveError",
    "LogitsOf",
    "assert_exactly_once",
    "assert_format",
    "assert_no_leak",
    "assert_resumes",
    "assert_same_in_every_world",
]
