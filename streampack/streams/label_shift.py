"""Labels of streams that state their targets: a labels column, a loss mask, or both.

One sample ``a b c d`` in which only c and d are targets, in the three ways to store it::

    tokens               a    b    c    d
    loss_mask            0    0    1    1
    labels, unshifted   -100 -100  c    d       each next to its own token
    labels, shifted     -100  c    d   -100     each next to the token before it
    in the batch        -100  c    d   -100     always shifted

Cases that the columns leave open:

- An added BOS makes token 0 a target if a mask or an unshifted column marks token 0. A shifted
  column has no entry for token 0, which is then not a target.
- An added EOS is a target if and only if the sample's last token is one. In a shifted column, the
  last label refers to the following token and decides this too.
- The last label of a shifted column is kept if the sample ends with its own last token, as in
  samples stored as ``text[:-1]`` with labels ``text[1:]``. It is dropped if the sample was
  truncated.

Cost: detecting the storage reads at most 64 samples, once per stream and process; they almost
always belong to one shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from streampack.errors import DataError
from streampack.streams.token_stream import TokenStream
from streampack.types import IGNORED, IntArray

NUM_LOOKED_AT = 64  # samples to inspect for the storage of labels


def labels_are_shifted(samples: Iterable[tuple[IntArray, IntArray]]) -> bool | None:
    """Detect from (tokens, labels) of some samples whether a labels column is stored shifted.

    True: every label is -100 or the token after its own. False: every label is -100 or its own
    token. None: both hold, or neither.

    >>> labels_are_shifted([(np.array([5, 6, 7]), np.array([-100, 7, -100]))])
    True
    >>> labels_are_shifted([(np.array([5, 6, 7]), np.array([-100, 6, 7]))])
    False
    """
    shifted = unshifted = True
    for tokens, labels in samples:
        unshifted &= bool(np.all((labels == IGNORED) | (labels == tokens)))
        # The token after the last one is unknown, so the last label may be anything.
        ahead = labels[:-1]
        shifted &= bool(np.all((ahead == IGNORED) | (ahead == tokens[1:])))
    return shifted if shifted != unshifted else None


def unclear_shift(name: str, num_samples: int) -> DataError:
    """Return the error for a stream if its first labels fit both ways of storage, or neither."""
    return DataError(
        f"stream {name!r}: the labels of its first {num_samples} samples do not tell "
        "whether they are shifted; say so with labels_shifted=True (labels[i] is for "
        "tokens[i + 1]) or labels_shifted=False (for tokens[i])"
    )


def detect_shift(stream: TokenStream) -> bool:
    """Detect from a stream's first samples whether its labels are shifted, or raise a DataError."""
    looked_at: list[tuple[IntArray, IntArray]] = []
    # A shard may be slow to fetch: read the next one only if those so far are inconclusive.
    for number in np.flatnonzero(np.diff(stream.first_sample)).tolist():
        shard = stream.open_shard(number)
        if shard.labels is None:
            continue
        looked_at += [
            (shard.tokens.read(shard.data, index), shard.labels.read(shard.data, index))
            for index in range(min(len(shard.labels.counts), NUM_LOOKED_AT - len(looked_at)))
        ]
        shifted = labels_are_shifted(looked_at)
        if shifted is not None:
            return shifted
        if len(looked_at) >= NUM_LOOKED_AT:
            break
    raise unclear_shift(stream.name, len(looked_at))
