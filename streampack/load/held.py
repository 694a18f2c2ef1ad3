"""Samples of iterables between their arrival and their packs: tokens and labels, until all has
left.

::

    arrive      keep tokens and labels, hand the packer (stream, pass, sample, length)
    packed      copy each segment into its row; a sample is let go with its last token

Cost: two copies a token. Memory: what the packer's bound allows, and the one sample being sliced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streampack.config import Packing
from streampack.errors import DataError
from streampack.read import Rows
from streampack.streams import IterableSample
from streampack.types import LENGTH, START, STREAM, TOTAL, Int64Array, Packs

__all__ = ["HeldSamples", "shifted_labels"]

IGNORED = -100


def shifted_labels(
    sample: IterableSample, packing: Packing, *, labels_shifted: bool
) -> tuple[Int64Array, Int64Array]:
    """Return a sample's tokens and shifted labels, with BOS and EOS where they are missing.

    A token is a target if its labels and loss mask say so; an added EOS goes by the token before
    it.

    Args:
        sample: Tokens, and labels or a loss mask if there are any.
        packing: Says which ids to add.
        labels_shifted: Whether labels[i] speaks of token i + 1 (True) or of token i.

    Returns:
        Tokens and labels, both of shape (n,).

    >>> sample = IterableSample(tokens=np.array([5, 6]), labels=None, loss_mask=None)
    >>> [part.tolist() for part in shifted_labels(sample, Packing(max_seq_len=8, eos_id=1),
    ...                                           labels_shifted=False)]
    [[5, 6, 1], [6, 1, -100]]
    """
    tokens = sample.tokens
    targets = tokens.copy()  # targets[i]: token i as a target, or IGNORED
    after = None  # the last label of a shifted column, which speaks of what follows
    if sample.labels is not None and labels_shifted:
        targets[0], targets[1:], after = IGNORED, sample.labels[:-1], int(sample.labels[-1])
    elif sample.labels is not None:
        targets = sample.labels.copy()
    if sample.loss_mask is not None:
        targets[sample.loss_mask == 0] = IGNORED
    bos, eos = packing.bos_id, packing.eos_id
    is_target = targets[-1] != IGNORED if after is None else after != IGNORED
    last = IGNORED if after is None else after
    if bos is not None and tokens[0] != bos:
        tokens, targets = np.append(bos, tokens), np.append(IGNORED, targets)
    if eos is not None and tokens[-1] != eos:
        tokens, targets = np.append(tokens, eos), np.append(targets, eos if is_target else IGNORED)
        last = IGNORED
    return tokens, np.append(targets[1:], last)


@dataclass(slots=True)
class _Held:
    tokens: Int64Array
    labels: Int64Array
    num_left: int


class HeldSamples:
    """The samples that one worker holds.

    Args:
        packing: What the packs are made with.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._samples: dict[tuple[int, ...], _Held] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is held."""
        return sum(held.tokens.nbytes + held.labels.nbytes for held in self._samples.values())

    def hold(
        self, key: tuple[int, int, int], tokens: Int64Array, labels: Int64Array, kept: int
    ) -> None:
        """Keep a sample until `kept` of its tokens have left.

        Args:
            key: Stream, pass and sample.
            tokens: Its tokens, shape (n,).
            labels: Its shifted labels, shape (n,).
            kept: Tokens that packs will take; fewer than n where it was truncated.
        """
        if kept < len(tokens):
            labels = labels[:kept].copy()
            labels[-1] = IGNORED
        self._samples[key] = _Held(tokens=tokens, labels=labels, num_left=kept)

    def rows(self, packs: Packs, num_rows: int) -> Rows:
        """Return the tokens and labels of packs, and let go of samples that are used up."""
        shape = (num_rows, self._packing.max_seq_len)
        tokens = np.full(shape, self._packing.padding_id, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        for row in range(len(packs)):
            filled = 0
            for segment in packs[row]:
                key = tuple(segment[STREAM:START].tolist())
                start, length = int(segment[START]), int(segment[LENGTH])
                held = self._samples.get(key)
                if held is None:
                    raise DataError(
                        f"stream {key[0]}, sample {key[2]} is packed but not held: packed twice"
                    )
                stop = filled + length
                tokens[row, filled:stop] = held.tokens[start : start + length]
                labels[row, filled:stop] = held.labels[start : start + length]
                filled = stop
                held.num_left -= length
                if held.num_left == 0:
                    del self._samples[key]
        # Labels are complete, so nobody asks for the tokens after segments.
        nexts = np.where(
            packs.segments[:, START] + packs.segments[:, LENGTH] == packs.segments[:, TOTAL],
            IGNORED,
            0,
        )
        return Rows(tokens=tokens, next_tokens=nexts, labels=labels)
