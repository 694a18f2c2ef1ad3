"""A chapter of a run as the planner sees it: exact shares, and where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class ChapterPlan:
    """A chapter as the planner sees it."""

    number: int
    """Index of the chapter."""
    begin: tuple[Fraction, ...]
    """Share of each stream at the first slot; they sum to 1. Streams without a share rest."""
    end: tuple[Fraction, ...]
    """Share of each stream after the last slot."""
    num_slots: int | None
    """Packs of the chapter: whole global batches. None: it has no end."""
    passes: int | None = None
    """Times that it delivers each sample of its one stream, at the end of a run; the last global
    batch is padded. None: it ends after `num_slots`."""
    ramp_slots: int = 0
    """Packs over which shares change; more than `num_slots` if the chapter was ended early."""

    @property
    def ramps(self) -> bool:
        """Whether a share changes."""
        return self.begin != self.end

    def shares_at(self, fraction: Fraction) -> list[Fraction]:
        """Return the shares after a fraction of the chapter."""
        pairs = zip(self.begin, self.end, strict=True)
        return [first + (last - first) * fraction for first, last in pairs]

    def fraction_at(self, slot: int) -> Fraction:
        """Return the fraction of the change of shares that is over at a slot."""
        return min(Fraction(slot, self.ramp_slots), Fraction(1)) if self.ramps else Fraction(0)

    def mean_share(self, stream: int, num_slots: int) -> Fraction:
        """Return the mean share of a stream over the first slots."""
        half = self.fraction_at(num_slots) / 2
        return self.begin[stream] + (self.end[stream] - self.begin[stream]) * half

    def uses(self, stream: int) -> bool:
        """Return whether a stream has a share at any time."""
        return bool(self.begin[stream] or self.end[stream])
