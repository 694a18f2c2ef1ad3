"""Which options work together: one table of rules, read by one function.

::

    check_combination({"pack_shuffle": 9000, "shuffle": False})
        ConfigError: pack_shuffle=9000 needs shuffle=True, not False: shuffled packs are not in
        stored order; set shuffle=True, or omit pack_shuffle
    docs/combinations.md
        the same table as a page

A rule is checked wherever all of its options are known, so each caller passes what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streampack.config.combination_table import TABLE, Option, Rule, listed
from streampack.errors import ConfigError

# Values that mean as little as None or False.
NOT_SET = {
    "context_parallel": 1,
    "epoch_end": "pad",
    "pack_shuffle": 0,
    "sampling_method": "balanced",
    "stop": "all_exhausted",
}


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
    for rule, option, other, reason in PAIRS:
        is_known = option.name in given and other.name in given and rule.by in {*given, ""}
        if is_known and _is_broken(rule, option, other, given):
            raise ConfigError(where + _message(rule, option, other, reason, given))


def _is_broken(rule: Rule, option: Option, other: Option, given: Mapping[str, Any]) -> bool:
    if not _is_meant(option, given) or given.get(rule.unless.name) in rule.unless.values:
        return False
    if rule.relation == "divides":
        value = given[other.name]
        return value is not None and bool(value % given[rule.by or option.name])
    return _is_meant(other, given) == (rule.relation == "excludes")


def _is_meant(option: Option, given: Mapping[str, Any]) -> bool:
    value = given[option.name]
    if option.values:
        return value in option.values
    return value is not None and value is not False and value != NOT_SET.get(option.name)


def _message(
    rule: Rule, option: Option, other: Option, reason: str, given: Mapping[str, Any]
) -> str:
    """Return a text: what is wrong, why, and a way out."""
    value, shown = given[other.name], _shown(option.name, given)
    found, usual = _shown(other.name, given), "omit one of them"
    if rule.relation == "excludes":
        problem = f"{shown} does not work with {found}"
    elif rule.relation == "needs":
        wanted = " or ".join(map(repr, other.values))
        needed = other.name + (wanted and f"={wanted}")
        problem = f"{shown} needs {needed}"
        problem += f", not {value!r:.80}" if wanted and value is not None else ""
        usual = "choose one of these" if len(other.values) > 1 else f"set {needed}"
        usual += f", or omit {option.name}"
    else:
        factor = given[rule.by or option.name]
        problem = f"{found} is not a multiple of {_shown(rule.by or option.name, given)}"
        problem += f", as {shown} needs" if rule.by else ""
        least = value // factor * factor
        usual = f"set it to {f'{least} or ' if least else ''}{least + factor}"
    why, _, way_out = reason.partition("; ")
    return f"{problem}: {why}; {(way_out or '{usual}').format(usual=usual, **given)}"


def _shown(option: str, given: Mapping[str, Any]) -> str:
    value = given[option]
    if option == "dataset":
        return str(value)
    if not isinstance(value, str | int | float | dict) or value is True:
        return option
    return f"{option}{' = ' if ' ' in option else '='}{value!r:.80}"


PAIRS = tuple(
    (rule, option, other, reason)
    for rows in TABLE.values()
    for rule, reason in rows.items()
    for option in listed(rule.options)
    for other in listed(rule.others)
)
