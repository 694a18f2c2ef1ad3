"""The chapters of a run as they were written, and as they were amended since.

::

    written     0: 100 steps                1: ...        of a config
    running     0: 40 steps   1: 60 steps   2: ...        after an amendment at step 40
    origins     0             0             1             where each was written

A state records the running chapters and their origins. So the written config still fits it, and so
does one into which the amendments were written.

Cost: none to speak of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from streampack.chapters import Chapter, Ramp
from streampack.plan.state_differences import CHECKS
from streampack.types import State


@dataclass(frozen=True, slots=True)
class RunChapters:
    """The chapters of a run."""

    chapters: tuple[Chapter, ...]
    origins: tuple[int, ...]
    """The written chapter that each comes from."""
    amended: frozenset[int] = frozenset()
    """Numbers of the chapters that an amendment changed."""

    @staticmethod
    def written(chapters: Sequence[Chapter]) -> RunChapters:
        """Return chapters as they were written."""
        return RunChapters(tuple(chapters), tuple(range(len(chapters))))

    def amend(
        self, number: int, weights: Mapping[str, Any], *, after: int, left: int | None
    ) -> RunChapters:
        """Return chapters of which one ends early; another of other weights takes its rest.

        Args:
            number: The chapter that ends.
            weights: The weights of its rest.
            after: Its steps; with 0, it is replaced.
            left: The steps of its rest; None: it has no end.
        """
        running, origins = self.chapters[number], self.origins
        if isinstance(weights, Mapping):
            weights = dict(weights)  # the caller may change it later
        rest = replace(running, weights=weights, until=None, steps=left, stop_after=None)
        parts = [replace(running, stop_after=after), rest] if after else [rest]
        num_more = len(parts) - 1
        return RunChapters(
            (*self.chapters[:number], *parts, *self.chapters[number + 1 :]),
            (*origins[:number], *[origins[number]] * len(parts), *origins[number + 1 :]),
            frozenset(
                [*range(number, number + len(parts))]
                + [n if n < number else n + num_more for n in self.amended]
            ),
        )

    def record(self, num_chapters: int) -> State:
        """Return what a state keeps beside the chapters of a run, as many as these."""
        amended = [number for number in sorted(self.amended) if number < num_chapters]
        sizes = [chapter.batch_size for chapter in self.chapters[:num_chapters]]
        origins = list(self.origins[:num_chapters])
        return {"origins": origins, "amended": amended, "batch_sizes": sizes}

    def as_recorded(
        self, state: State, records: Sequence[Mapping[str, Any]], steps: Sequence[int | None]
    ) -> RunChapters | None:
        """Return these written chapters with the amendments of a state; None if it fits none.

        `steps` are the lengths of the written chapters. What is left of one when its parts before
        are taken off is the length of its last part: so it follows an edit, and is nothing where
        the amendments were written into the chapters.
        """
        origins = CHECKS.items("origins", state.get("origins"), len(records))
        for origin in origins:
            CHECKS.integer("origins", origin, 0, len(records))
        amended = CHECKS.up_to("amended", state.get("amended"), len(records))
        for number in amended:
            CHECKS.integer("amended", number, 0, len(records) - 1)
        written = self.chapters
        if not amended or max(origins[n] for n in amended) >= len(written):
            return None
        last = max(amended)
        replayed: list[Chapter] = []
        for n, origin in enumerate(origins[: last + 1]):
            length = records[n].get("steps")
            if origin not in origins[n + 1 :] and (length := steps[origin]) is not None:
                begun = [records[m].get("steps") for m in range(n) if origins[m] == origin]
                length -= sum(CHECKS.integer("steps", part, 0, 2**62) for part in begun)
                if length < 1:
                    return None
            is_amended = n in amended
            chapter = written[origin]
            replayed.append(_as_recorded(chapter, records[n], length) if is_amended else chapter)
        rest = range(origins[last] + 1, len(written))
        return RunChapters(
            (*replayed, *[written[origin] for origin in rest]),
            (*origins[: last + 1], *rest),
            frozenset(amended),
        )


def _as_recorded(chapter: Chapter, record: Mapping[str, Any], steps: int | None) -> Chapter:
    """Return a written chapter with the weights that a state records, and a length."""
    weights: dict[str, Any] = {}
    try:
        for name, (begin, end) in CHECKS.mapping("weights", record.get("weights")).items():
            first, last = Fraction(begin), Fraction(end)
            weights[name] = first if first == last else Ramp(first, last)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CHECKS.error("weights", record.get("weights"), wanted="shares by name") from error
    is_left = record.get("steps") != record.get("ramp_steps") is not None
    whole, stop = (record["ramp_steps"], steps) if is_left else (steps, None)
    return replace(chapter, weights=weights, until=None, steps=whole, stop_after=stop)
