"""The options of a plan, and its streams in lanes.

::

    PlanOptions --> Recipe --> lane_stream(number, lane) --> the part an epoch takes there

Cost: a stream is assigned to all lanes when one of them is first used, see `plan_options`.
"""

from __future__ import annotations

from dataclasses import dataclass

from streampack.plan.lane_stream import LaneStream
from streampack.plan.plan_options import PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe(PlanOptions):
    """Everything that determines which segments lie in pack q of an epoch."""

    def lane_stream(self, number: int, lane: int) -> LaneStream:
        """Return one stream in one lane."""
        runs, shares = self._assignment(number)
        extents = runs[0] if shares is None else runs[lane]
        return LaneStream(self, number, extents, lane, shares)

    def is_used(self, lane: int, column: int) -> bool:
        """Return whether epochs take any sample in a column of a lane."""
        return any(self.lane_stream(number, lane).is_used for number in self.streams_in(column))

    @property
    def skips_lanes(self) -> bool:
        """Whether slots pass over lanes that hold no sample of a global batch's stream.

        A device's slots then lie in other lanes in each global batch.
        """
        is_endless = self.mixing.epoch_end == "carry"
        is_whole = self.mixing.batching_method == "per_stream"
        if not (is_endless and is_whole and self.keeps_last_apart):
            return False
        if "skips_lanes" not in self._facts:
            used = [
                [self.is_used(lane, column) for lane in range(self.num_lanes)]
                for column in range(self.num_columns)
            ]
            self._facts["skips_lanes"] = any(any(each) and not all(each) for each in used)
        return self._facts["skips_lanes"]
