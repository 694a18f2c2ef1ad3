"""Which samples were in a step of a run, and which steps a sample was in, from the plan alone.

::

    step --> epoch or chapter, position --> the plan from the start or a state on --> packs
                                                '--> ranks and rows, by the run's worlds

A step of the run is a global batch, counted from 0 over all epochs or chapters.

Cost: planning, about 0.4 us a sample, from the start of the run or from a state.
"""

from streampack.lookback.at import at
from streampack.lookback.differences import difference
from streampack.lookback.rows import Row, StepRows
from streampack.lookback.steps import last_step_begun
from streampack.lookback.where import Found, where

__all__ = [
    "Found",
    "Row",
    "StepRows",
    "at",
    "difference",
    "last_step_begun",
    "where",
]
