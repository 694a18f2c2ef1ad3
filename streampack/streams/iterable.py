"""`IterableStream`: any iterable of samples as a stream, for the buffered way.

::

    IterableStream(rows, proportion=0.3)     rows: [5, 6, 7], {"tokens": [5, 6, 7]}, an array, ...

Lengths are known only once a sample is there, so nothing can be planned ahead.

Cost: none; the source is read when the loader asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streampack.errors import ConfigError, DataError
from streampack.types import Int64Array

__all__ = ["IterableSample", "IterableStream"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterableSample:
    """One sample of an iterable, as arrays."""

    tokens: Int64Array
    """Token ids, shape (num_tokens,)."""
    labels: Int64Array | None
    """Labels, shape (num_tokens,), if the stream has them."""
    loss_mask: Int64Array | None
    """Which tokens are targets, shape (num_tokens,), if the stream says so."""


@dataclass(frozen=True, slots=True, eq=False)
class IterableStream:
    """A weighted iterable of samples: token lists, arrays, or dicts that hold them.

    Raises:
        ConfigError: If the weight is negative, or the source cannot be iterated.

    >>> IterableStream([[5, 6], [7]], proportion=0.3).sample([5, 6], 0).tokens.tolist()
    [5, 6]
    """

    source: Iterable[Any]
    """Where the samples come from."""
    proportion: float | None = None
    """Its share of the samples (or tokens), relative to the other streams'."""
    name: str | None = None
    """What messages and reports call it."""
    tokens: str = "tokens"
    """Field of the tokens in dicts; as the default, "input_ids" is found too."""
    labels: str | None = None
    """Field of labels, as many as tokens."""
    labels_shifted: bool | None = None
    """Whether labels[i] is the target at token i (True) or is token i (False); None: look."""
    loss_mask: str | None = None
    """Field that says which tokens are targets, as many as tokens."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, Iterable):
            raise ConfigError(
                f"source={self.source!r} cannot be iterated; give a list, a generator or a dataset"
            )
        if self.proportion is not None and not 0 <= self.proportion < float("inf"):
            raise ConfigError(
                f"proportion={self.proportion}: a weight must be a number of 0 or more; "
                "0 leaves the stream out"
            )

    def sample(self, item: Any, number: int) -> IterableSample:
        """Turn one item of the source into arrays.

        Args:
            item: What the source gave.
            number: How many it gave before, for messages.

        Raises:
            DataError: If a field is missing, holds no integers, or is not as long as the tokens.
        """
        where = f"stream {self.name or 'of an iterable'!r}, sample {number}"
        if not isinstance(item, Mapping):
            item = {self.tokens: item}
        wanted = self.tokens
        if wanted == "tokens" and wanted not in item and "input_ids" in item:
            wanted = "input_ids"
        tokens = _integers(item, wanted, where)
        if len(tokens) == 0:
            raise DataError(f"{where}: 0 tokens, but a sample needs 1 or more; leave it out")
        labels, loss_mask = (
            None if field is None else _beside(tokens, item, field, where)
            for field in (self.labels, self.loss_mask)
        )
        return IterableSample(tokens=tokens, labels=labels, loss_mask=loss_mask)


def _beside(tokens: Int64Array, item: Mapping[str, Any], field: str, where: str) -> Int64Array:
    values = _integers(item, field, where)
    if len(values) != len(tokens):
        raise DataError(
            f"{where}: {len(tokens)} tokens, but {len(values)} values in {field!r}; "
            "give one for each token"
        )
    return values


def _integers(item: Mapping[str, Any], field: str, where: str) -> Int64Array:
    if field not in item:
        raise DataError(
            f"{where}: no field {field!r}; it has {', '.join(map(repr, item))}; "
            "set tokens=, labels= or loss_mask= to one of them"
        )
    values = np.asarray(item[field])
    if values.size and values.dtype.kind not in "iub":
        raise DataError(
            f"{where}: field {field!r} holds {values.dtype}, but must hold integers; tokenize first"
        )
    return values.reshape(-1).astype(np.int64)
