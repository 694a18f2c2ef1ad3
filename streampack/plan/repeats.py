"""How often a run takes a stream: what its chapters are expected to deliver of it, and the check.

::

    chapter 0    web 3/4, math 1/4, 100 steps of 4 packs of 64 tokens     6,400 tokens of math
    chapter 1    math, passes=1                                           all of its tokens

Tokens are expected, for full packs and, where shares count samples, samples of mean length. Lanes
serve as many packs, so that the one with the fewest tokens takes its samples most often.

Cost: with `max_repeats`, the tokens of each lane: O(shards), or the lengths of all samples where
they are truncated or dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from streampack.errors import ConfigError, suggest
from streampack.mix.weights import exact_share
from streampack.plan.lane_stream import LaneStream
from streampack.plan.recipe import Recipe


def taken_tokens(recipe: Recipe, number: int, num_slots: int) -> Fraction:
    """Return the expected tokens of a stream in a chapter's first slots; at least one slot."""
    plan, stream = recipe.chapter, recipe.streams[number]
    if plan is None or not num_slots:
        return Fraction(0)
    if plan.passes is not None and plan.num_slots is not None:
        whole = plan.passes * stream.num_tokens if plan.uses(number) else 0
        return Fraction(whole * num_slots, plan.num_slots)
    share = plan.mean_share(number, num_slots)
    if recipe.target_unit == "samples":
        means = [Fraction(each.num_tokens, max(each.num_samples, 1)) for each in recipe.streams]
        mixed = sum(plan.mean_share(n, num_slots) * mean for n, mean in enumerate(means))
        share = share * means[number] / mixed if mixed else share
    return share * num_slots * recipe.row_tokens


def check_repeats(recipes: Sequence[Recipe]) -> None:
    """Refuse a run that takes a stream more often than `Mixing.max_repeats`.

    Raises a ConfigError if it does, has no end, or if the limit names an unknown stream.
    """
    mixing, names = recipes[0].mixing, recipes[0].names
    asked, last = mixing.max_repeats, recipes[-1].chapter
    if asked is None or last is None:
        return
    for name in asked if isinstance(asked, Mapping) else ():
        if name not in names:
            raise ConfigError(
                f"max_repeats names {name!r}, and the streams are {', '.join(map(repr, names))}"
                f"{suggest(name, names)}; write one of these"
            )
    is_endless = last.num_slots is None and last.passes is None
    limited = (n for n, name in enumerate(names) if mixing.max_repeats_of(name) is not None)
    if is_endless and any(map(last.uses, limited)):
        raise ConfigError(
            f"max_repeats={asked!r}, and the run has no end: it takes its streams any number of "
            "times; give the last chapter steps, or omit max_repeats"
        )
    for number, name in enumerate(names):
        most = mixing.max_repeats_of(name)
        taken = sum((_repeats(recipe, number) for recipe in recipes), Fraction(0))
        if most is not None and taken > exact_share(most):
            raise ConfigError(
                f"the run takes stream {name!r} {math.ceil(taken * 100) / 100:g} times in the lane "
                f"with the fewest tokens of it, and max_repeats allows {most:g}; lower its weights "
                "or the steps, or raise max_repeats"
            )


def _repeats(recipe: Recipe, number: int) -> Fraction:
    """Return how often a chapter takes a stream in the lane with the fewest tokens of it."""
    plan = recipe.chapter
    if plan is None or not plan.uses(number):
        return Fraction(0)
    if plan.passes is not None:
        return Fraction(plan.passes)
    lanes = [LaneStream(recipe, number, lane) for lane in range(recipe.num_lanes)]
    in_pass = [lane.tokens_in_pass for lane in lanes if not lane.is_empty]
    # Of a stream that all lanes share, each has the whole pass.
    is_shared = recipe.assignment(number)[1] is None
    whole = in_pass[0] if is_shared else len(in_pass) * min(in_pass)
    return taken_tokens(recipe, number, plan.num_slots or 0) / max(whole, 1)
