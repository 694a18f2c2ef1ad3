"""A run in chapters: mixtures, lengths and batch sizes that change at given steps.

::

    tokens      0 ------------------ 2T -------------- 2.5T ------- 2.6T
    chapter     0                    1                 2
    web         0.8                  0.8 falls to 0.4  0.4
    code        0.2                  0.2               -            its place is kept
    math        -                    0 rises to 0.4    0.6

What a stream has delivered is carried from chapter to chapter. No sample is used again before all
others of its lane were, whatever the weights do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from streampack._checks import is_weight, parse_count, read_optional_count, show_number
from streampack.config import Packing
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError

# Fields of Packing that may differ between chapters, in the order of a saved state.
SHAPES = (
    *("max_seq_len", "method", "buffer_tokens", "buffer_samples"),
    *("max_samples_per_pack", "short_seq_len"),
)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A weight that changes linearly over its chapter. The chapter needs an end.

    Raises:
        ConfigError: If a weight is not a finite number of at least 0.

    >>> Ramp(0.8, 0.4).stop
    0.4
    """

    start: float | Fraction | Decimal
    """Weight at the chapter's first step."""
    stop: float | Fraction | Decimal
    """Weight after the chapter's last step."""

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            _check_weight(f"Ramp({name}=", getattr(self, name), ")")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A part of a run with its own mixture; see `PackedStreamingDataset(chapters=...)`.

    Raises:
        ConfigError: If a weight is not a number of at least 0, or all are 0; if a chapter with a
            `Ramp` has no end, or the sum of its weights changes; if two of `until`, `steps` and
            `passes` are given, or a chapter with `passes` has several streams.

    >>> Chapter(weights={"web": 0.8, "code": 0.2}, until="2t").until
    2000000000000
    """

    weights: Mapping[str, float | Fraction | Decimal | Ramp]
    """Share of each stream, by name. Weights are divided by their sum. Streams that are omitted
    pause, and later continue where they stopped."""
    until: int | str | None = None
    """Length of the chapter in tokens, rounded to whole global batches: packs times `max_seq_len`.
    Text such as "2t" or "500b" is accepted. None: see `steps`."""
    steps: int | None = None
    """Length of the chapter in global batches, instead of `until`. None for both: the chapter has
    no end, and is the last."""
    passes: int | None = None
    """Number of passes over one stream, instead of `until` or `steps`, for the last chapter of a
    run. No earlier chapter may have this stream. The run ends when each of its samples has been
    delivered that many times. The last global batch is padded."""
    packing: Packing | None = None
    """How samples share packs. Only the length, the method and its options may differ from the
    run's packing; other fields, if omitted, are taken from the run's packing. None: the run's
    packing."""
    batch_size: int | None = None
    """Packs per device batch. None: the dataset's batch_size."""
    global_batch_size: int | None = None
    """Packs per optimizer step. None: the value in the dataset's `Mixing`."""
    stop_after: int | None = None
    """Global batches after which the run leaves the chapter, before its end. Ramps do not get
    steeper. ``loader.amend`` sets this field. None: the chapter runs to its end."""

    def __post_init__(self) -> None:
        for name in ("steps", "passes", "batch_size", "global_batch_size", "stop_after"):
            object.__setattr__(self, name, read_optional_count(name, getattr(self, name)))
        object.__setattr__(self, "until", parse_count("until", self.until))
        self._check_length()
        if self.packing is not None and not isinstance(self.packing, Packing):
            raise ConfigError(
                f"packing={self.packing!r:.80} of a chapter is not a Packing; pass "
                "Packing(max_seq_len=...), or omit it to use the run's"
            )
        self._check_weights()

    @property
    def is_open(self) -> bool:
        """Whether the chapter has no end."""
        lengths = (self.until, self.steps, self.passes, self.stop_after)
        return all(length is None for length in lengths)

    @property
    def ramps(self) -> bool:
        """Whether a weight changes."""
        return any(isinstance(weight, Ramp) for weight in self.weights.values())

    def shares(self, *, at_end: bool = False) -> dict[str, Fraction]:
        """Return the share of each stream at the chapter's first step, or after its last.

        >>> chapter = Chapter(weights={"a": Ramp(1, 0), "b": Ramp(0, 1), "c": 1}, steps=10)
        >>> [str(share) for share in chapter.shares(at_end=True).values()]
        ['0', '1/2', '1/2']
        """
        exact = {name: _value(weight, at_end) for name, weight in self.weights.items()}
        whole = sum(exact.values())
        return {name: value / whole for name, value in exact.items()}

    def _check_length(self) -> None:
        stated = {name: getattr(self, name) for name in ("until", "steps", "passes")}
        if self.passes is not None:
            stated["stop_after"] = self.stop_after
        given = [f"{name}={value}" for name, value in stated.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{given[0]} and {given[1]} both set the length of a chapter; omit one of them"
            )

    def _check_weights(self) -> None:
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise ConfigError(
                f"weights={self.weights!r:.80} are not the shares of streams by name; write "
                '{"web": 0.8, "code": 0.2}'
            )
        for name, weight in self.weights.items():
            if not isinstance(name, str):
                raise ConfigError(f"weights have the key {name!r:.80}; write a stream's name")
            if not isinstance(weight, Ramp):
                _check_weight(f"weights[{name!r}]=", weight)
        sums = [
            sum(_value(weight, at_end) for weight in self.weights.values())
            for at_end in (False, True)
        ]
        if not all(sums):
            raise ConfigError(
                f"all weights of {list(self.weights)} are 0 at one end of the chapter; give at "
                "least one stream more"
            )
        if sums[0] != sums[1]:
            raise ConfigError(
                f"the weights sum to {float(sums[0]):g} at the chapter's first step and to "
                f"{float(sums[1]):g} at its end; change a Ramp so that both sums are equal"
            )
        if self.ramps and self.until is None and self.steps is None:
            raise ConfigError(
                f"weights={self.weights}: a Ramp is linear over its chapter, and this "
                "chapter has no end; set until or steps, or write a number instead of the Ramp"
            )
        if self.passes is not None and sum(map(bool, self.shares().values())) > 1:
            raise ConfigError(
                f"passes={self.passes} is for a single stream, but the weights name "
                f"{', '.join(map(repr, self.weights))}; give a weight to one of them, or set steps"
            )


def _value(weight: Any, at_end: bool) -> Fraction:
    if isinstance(weight, Ramp):
        weight = weight.stop if at_end else weight.start
    # As it was written: 0.29 is 29/100, not the nearest binary float.
    if isinstance(weight, int | Fraction | Decimal):
        return Fraction(weight)
    return Fraction(repr(float(weight)))


def _check_weight(before: str, value: Any, after: str = "") -> None:
    if not is_weight(value):
        shown = show_number(value)
        raise ConfigError(
            f"{before}{shown:.80}{after} is not a weight; write a number of at least 0, such as 0.5"
        )


def check_chapters(chapters: Any, packing: Packing) -> tuple[Chapter, ...]:
    """Return the chapters of a run.

    Raises:
        ConfigError: If a chapter other than the last has no end, or a packing changes more than
            sizes. The message names the chapter.
    """
    if isinstance(chapters, Chapter) or not isinstance(chapters, list | tuple):
        raise ConfigError(f"chapters={chapters!r:.80} is not a list; write [Chapter(...), ...]")
    if not chapters:
        raise ConfigError(f"chapters={chapters!r} is empty; omit it, or pass at least one Chapter")
    for number, chapter in enumerate(chapters):
        if not isinstance(chapter, Chapter):
            raise ConfigError(
                f"chapters[{number}]={chapter!r:.80} is not a Chapter; write "
                "Chapter(weights={...}, until=...)"
            )
        if chapter.is_open and number + 1 < len(chapters):
            raise ConfigError(
                f"chapters[{number}] has no end, so no chapter can follow it; set its until "
                "or steps"
            )
        if chapter.passes is not None and number + 1 < len(chapters):
            raise ConfigError(
                f"chapters[{number}] has passes={chapter.passes}, and the run ends with them; set "
                "its until or steps, or make it the last"
            )
    return tuple(
        chapter
        if chapter.packing is None
        else replace(chapter, packing=_completed(number, chapter.packing, packing))
        for number, chapter in enumerate(chapters)
    )


def _completed(number: int, packing: Packing, whole: Packing) -> Packing:
    """Return the packing of a chapter, with the run's values in fields that must not change."""
    kept = {}
    for field in fields(packing):
        value, needed = getattr(packing, field.name), getattr(whole, field.name)
        if field.name in SHAPES or value == needed:
            continue
        if value != field.default:
            raise ConfigError(
                f"chapters[{number}].packing has {field.name}={value!r}, but the run has "
                f"{needed!r}; samples that wait from chapter to chapter would change: set it in "
                "the run's packing, for all chapters"
            )
        kept[field.name] = needed
    return replace(packing, **kept)


def check_skip(skip: Any, *, has_chapters: bool) -> tuple[tuple[int, int], ...]:
    """Return inclusive ranges of steps as ranges [first, stop).

    Raises:
        ConfigError: If a range is not a pair of steps, or the run has no chapters.

    >>> check_skip([(10, 12)], has_chapters=True)
    ((10, 13),)
    """
    ranges = []
    for pair in skip:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(type(step) is int and step >= 0 for step in pair):
            raise ConfigError(
                f"skip has {pair!r:.80}, which is not a range of steps; write (first, last), "
                "counted from 0"
            )
        if pair[1] < pair[0]:
            raise ConfigError(
                f"skip has {tuple(pair)}, with the last step before the first; write "
                f"({pair[1]}, {pair[0]})"
            )
        ranges.append((pair[0], pair[1] + 1))
    check_combination({"skip": str(skip) if ranges else None, "chapters": has_chapters})
    return tuple(sorted(ranges))
