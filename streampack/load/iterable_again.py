"""Samples that a state holds, as their sources give them now: are they what they were?

::

    state     address of a piece, its digest  --.
    source    the sample, read again            +--> held again, or a DataError that names it

A source that changed since would be packed into rows that nobody planned: other tokens, or those of
another sample under this one's name.

Cost: that of preparing the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streampack.errors import DataError
from streampack.load.held import DIGEST, HeldSamples
from streampack.load.iterable_intake import SAME_SAMPLES
from streampack.load.prepared import Key, Prepared
from streampack.streams import IterableStream
from streampack.types import START, TOTAL, Int64Array

__all__ = ["Again", "check_piece", "check_whole", "key_of"]

OTHERWISE = "has other tokens, labels or fields than when the state was saved"


class Again(NamedTuple):
    """A sample that was read again."""

    key: Key
    ready: Prepared
    rows: Int64Array
    """Its segments, shape (n, 6); none if it is dropped now."""

    @property
    def total(self) -> int:
        """Tokens of it that packs take."""
        return int(self.rows[-1, TOTAL])


def key_of(address: Sequence[int]) -> Key:
    """Return whose piece lies at an address."""
    stream, pass_, number = map(int, address[:START])
    return stream, pass_, number


def check_piece(
    address: Sequence[int], again: Again, held: HeldSamples, streams: Sequence[IterableStream]
) -> None:
    """Refuse a piece of a sample that is not what it was.

    Args:
        address: Where it was held; see `HeldSamples.state_dict`.
        again: Its sample.
        held: Makes its digest.
        streams: Say what the sample is called.

    Raises:
        DataError: Naming the sample.
    """
    start, length = map(int, address[START : START + 2])
    if [start, length] not in again.rows[:, START:TOTAL].tolist():
        were = f"{length}" if not start else f"{length} that follow its first {start}"
        what = f"has {len(again.ready.tokens)} tokens, of which the state holds {were}"
        raise _changed(again, what, streams)
    if held.digest(again.ready, start, length, again.total) != address[DIGEST]:
        raise _changed(again, OTHERWISE, streams)


def check_whole(
    digest: int, again: Again, held: HeldSamples, streams: Sequence[IterableStream]
) -> None:
    """Refuse a sample that is being sliced and is not what it was; see `check_piece`.

    Raises:
        DataError: Naming the sample.
    """
    if held.whole_digest(again.ready) != digest:
        raise _changed(again, OTHERWISE, streams)


def _changed(again: Again, what: str, streams: Sequence[IterableStream]) -> DataError:
    stream, pass_, number = again.key
    where = streams[stream].where(number)
    return DataError(f"{where} of pass {pass_} {what}{SAME_SAMPLES}")
