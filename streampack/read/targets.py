"""Labels of streams that say which tokens are targets: a labels column, a loss mask, or both.

One sample ``a b c d`` of which only c and d are targets, in the three ways to store that::

    tokens               a    b    c    d
    loss_mask            0    0    1    1
    labels, unshifted   -100 -100  c    d       each beside its own token
    labels, shifted     -100  c    d   -100     each beside the token before it
    in the batch        -100  c    d   -100     always shifted

What the columns leave open:

- An added BOS makes token 0 a target as a mask or an unshifted column says; a shifted column has no
  word on it, so it is none.
- An added EOS is a target if and only if the last own token is one; in a shifted column the last
  label, which speaks of what follows, says so too.
- The last label of a shifted column is kept where the sample ends with its own last token (samples
  stored as ``text[:-1]`` with labels ``text[1:]``), and dropped where the sample was truncated.

Cost: telling how labels are stored reads at most 64 samples, once a stream and process; nearly
always those of one shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from streampack.errors import DataError
from streampack.streams.opened import OpenStream
from streampack.types import IGNORED, IntArray

__all__ = ["NUM_LOOKED_AT", "detect_shift", "labels_are_shifted", "unclear_shift"]

NUM_LOOKED_AT = 64  # samples that tell how labels are stored


def labels_are_shifted(samples: Iterable[tuple[IntArray, IntArray]]) -> bool | None:
    """Tell from (tokens, labels) of some samples how a labels column is stored.

    Returns:
        True if every label is -100 or the token after it, False if -100 or its own token; None if
        both are so, or neither.

    >>> labels_are_shifted([(np.array([5, 6, 7]), np.array([-100, 7, -100]))])
    True
    >>> labels_are_shifted([(np.array([5, 6, 7]), np.array([-100, 6, 7]))])
    False
    """
    shifted = unshifted = True
    for tokens, labels in samples:
        unshifted &= bool(np.all((labels == IGNORED) | (labels == tokens)))
        # Nothing is known of the token after the last one, so the last label may be anything.
        ahead = labels[:-1]
        shifted &= bool(np.all((ahead == IGNORED) | (ahead == tokens[1:])))
    return shifted if shifted != unshifted else None


def unclear_shift(name: str, num_samples: int) -> DataError:
    """Return the error of a stream whose first samples fit both ways of storing labels, or none."""
    return DataError(
        f"stream {name!r}: the labels of its first {num_samples} samples do not tell "
        "whether they are shifted; say so with labels_shifted=True (labels[i] is for "
        "tokens[i + 1]) or labels_shifted=False (for tokens[i])"
    )


def detect_shift(stream: OpenStream) -> bool:
    """Look at a stream's first samples for how its labels are stored.

    Raises:
        DataError: If they fit both ways, or neither.
    """
    looked_at: list[tuple[IntArray, IntArray]] = []
    # A shard may be fetched from far away: the next one only if those before it do not tell.
    for shard in np.flatnonzero(np.diff(stream.first_sample)).tolist():
        looked_at += _first_samples(stream, shard, NUM_LOOKED_AT - len(looked_at))
        shifted = labels_are_shifted(looked_at)
        if shifted is not None:
            return shifted
        if len(looked_at) >= NUM_LOOKED_AT:
            break
    raise unclear_shift(stream.name, len(looked_at))


def _first_samples(
    stream: OpenStream, number: int, at_most: int
) -> list[tuple[IntArray, IntArray]]:
    """Return tokens and labels of a shard's first samples."""
    shard = stream.open_shard(number)
    labels = shard.labels
    if labels is None:
        return []
    return [
        (shard.tokens.read(shard.data, index), labels.read(shard.data, index))
        for index in range(min(len(labels.counts), at_most))
    ]
