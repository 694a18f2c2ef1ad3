"""How many of each stream, and whose slot: weights and schedules, integers in, integers out."""

from streampack.mix.apportion import largest_remainders, parts, scaled_shares
from streampack.mix.deficit import Deficits
from streampack.mix.schedule import Schedule
from streampack.mix.weights import Quota, Weight, check_weights, exact_share, resolve_weights

__all__ = [
    "Deficits",
    "Quota",
    "Schedule",
    "Weight",
    "check_weights",
    "exact_share",
    "largest_remainders",
    "parts",
    "resolve_weights",
    "scaled_shares",
]
