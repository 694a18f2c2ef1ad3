"""Which options work together: one table of rules, read by one function.

::

    check_combination({"max_cost": 9000, "context_parallel": 2})
        ConfigError: max_cost=9000 does not work with context_parallel=2: the bound is on whole
        packs, and context parallelism cuts them; omit one of them
    docs/combinations.md
        the same table as a page

A rule is checked wherever all of its options are known, so each caller passes what it knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streampack.config.combination_table import TABLE
from streampack.errors import ConfigError

# Values that mean as little as None or False.
NOT_SET = {
    "context_parallel": 1,
    "epoch_end": "pad",
    "on_bad_row": "error",
    "pack_shuffle": 0,
    "sampling_method": "balanced",
    "stop": "all_exhausted",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One option and what it needs, excludes or divides; see `TABLE`."""

    relation: str
    option: str
    when: tuple[str, ...]
    """Values of the option that have the requirement; empty: all but its default."""
    other: str
    values: tuple[str, ...]
    """Values of the other option that are meant; empty: all but its default."""
    factor: str
    unless: str
    exempt: tuple[str, ...]
    """Values of `unless` with which the rule does not apply."""
    why: str
    way_out: str

    def is_broken(self, given: Mapping[str, Any]) -> bool:
        """Whether a combination of options breaks this rule."""
        value, other = given[self.option], given[self.other]
        if not _matches(self.option, value, self.when):
            return False
        if self.unless and str(given.get(self.unless)) in self.exempt:
            return False
        if self.relation == "divides":
            return other is not None and bool(other % given[self.factor])
        return _matches(self.other, other, self.values) == (self.relation == "excludes")

    def message(self, given: Mapping[str, Any]) -> str:
        """Return a text: what is wrong, why, and a way out."""
        value, other = given[self.option], given[self.other]
        shown, usual = _shown(self.option, value), "omit one of them"
        if self.relation == "excludes":
            problem = f"{shown} does not work with {_shown(self.other, other)}"
        elif self.relation == "needs":
            wanted = " or ".join(v if v in ("True", "1") else repr(v) for v in self.values)
            problem = f"{shown} needs {self.other}" + (f"={wanted}" if wanted else "")
            problem += f", not {other!r:.80}" if wanted and other is not None else ""
            is_choice = len(self.values) > 1
            usual = (
                "choose one of these"
                if is_choice
                else f"set {self.other}" + (wanted and f"={wanted}")
            )
            usual += f", or omit {self.option}"
        else:
            factor = given[self.factor]
            problem = f"{_shown(self.other, other)} is not a multiple of "
            problem += _shown(self.factor, factor)
            problem += f", as {shown} needs" if self.factor != self.option else ""
            least = other // factor * factor
            usual = f"set it to {f'{least} or ' if least else ''}{least + factor}"
        way_out = (self.way_out or "{usual}").format(usual=usual, **given)
        return f"{problem}: {self.why}; {way_out}"


def check_combination(given: Mapping[str, Any], where: str = "") -> None:
    """Refuse options that do not work together.

    Args:
        given: Options by the names in `TABLE`, as far as they are known.
        where: The stream or chapter that they are of, for the message.

    Raises:
        ConfigError: If a rule is broken. It names both values, the reason and a way out.

    >>> check_combination({"pack_shuffle": 5, "shuffle": False})
    Traceback (most recent call last):
    streampack.errors.ConfigError: pack_shuffle=5 needs shuffle=True, not False: ...
    """
    for rule in RULES:
        is_known = rule.option in given and rule.other in given and rule.factor in {*given, ""}
        if is_known and rule.is_broken(given):
            raise ConfigError(where + rule.message(given))


def _matches(option: str, value: Any, values: tuple[str, ...]) -> bool:
    if values:
        return str(value) in values
    return value is not None and value is not False and value != NOT_SET.get(option)


def _shown(option: str, value: Any) -> str:
    if option == "dataset":
        return str(value)
    if not isinstance(value, str | int | float | dict) or value is True:
        return option
    return f"{option}{' = ' if ' ' in option else '='}{value!r:.80}"


def parts_of(text: str) -> tuple[str, str, str, str, str]:
    """Return the options, the relation, the other options, the factor and the exception of a rule.

    >>> parts_of("pad_to_multiple divides short_seq_len, capacity")
    ('pad_to_multiple', 'divides', 'short_seq_len, capacity', '', '')
    """
    rule, _, third = text.partition(" unless ")
    options, relation, others = re.split(" (needs|excludes|divides) ", rule)
    others, _, factor = others.partition(" by ")
    return options, relation, others, factor, third


def _rules() -> Iterator[Rule]:
    for text, reason in (row for rows in TABLE.values() for row in rows.items()):
        options, relation, others, factor, third = parts_of(text)
        why, _, way_out = reason.partition("; ")
        unless, exempt = _split(third)
        for option, when in map(_split, options.split(", ")):
            for other, values in map(_split, others.split(", ")):
                of = factor or (option if relation == "divides" else "")
                yield Rule(relation, option, when, other, values, of, unless, exempt, why, way_out)


def _split(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, values = text.partition("=")
    return name, tuple(values.split("|")) if values else ()


RULES = tuple(_rules())
