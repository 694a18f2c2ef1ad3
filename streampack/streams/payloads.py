"""`Payloads`: objects of an iterable's samples beside their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streampack.config.moved import with_known_options


@with_known_options
@dataclass(frozen=True)
class Payloads:
    """Objects that samples have beside their tokens, such as images.

    >>> Payloads({"images": "spans"}, split=True).split
    True
    """

    payloads: Mapping[str, str | None]
    """Fields with objects of a sample, each with the field of their token spans: pairs of the first
    token and one past the last. None as the field of spans: the objects belong to the whole
    sample."""
    cost: Callable[[Any], int] | None = None
    """Returns the token slots that an item's objects take beyond its tokens. The slots follow the
    tokens as padding."""
    split: bool = False
    """Whether a sample with payloads may be split between spans if it is longer than a pack."""
