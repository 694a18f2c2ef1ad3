"""How often a run takes a stream: what its chapters are expected to deliver of it.

::

    chapter 0    web 3/4, math 1/4, 100 steps of 4 packs of 64 tokens     6,400 tokens of math
    chapter 1    math, passes=1                                           all of its tokens

Tokens are expected, for full packs and, where shares count samples, samples of mean length.
"""

from __future__ import annotations

from fractions import Fraction

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
