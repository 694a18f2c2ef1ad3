"""Check that buffered samples, read again on resume, have not changed since the state was saved.

::

    state     address of a piece, its digest  --.
    source    the sample, read again            +--> buffered again, or a DataError that names it

Without this check, a changed source would give rows of other tokens, or another sample's tokens
under this sample's number.

Cost: that of encoding the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streampack.errors import DataError
from streampack.online.sample_buffer import SampleBuffer
from streampack.online.sample_buffer_kernels import DIGEST
from streampack.online.samples import EncodedSample, SampleKey
from streampack.online.stream_sampler import SAME_SAMPLES
from streampack.streams import IterableStream
from streampack.types import START, TOTAL, Int64Array

OTHERWISE = "has other tokens, labels or fields than when the state was saved"


class ReplayedSample(NamedTuple):
    """A sample that was read again."""

    key: SampleKey
    ready: EncodedSample
    rows: Int64Array
    """Its segments, shape (n, 6); none if it is now dropped."""

    @property
    def total(self) -> int:
        """Tokens of it that are packed."""
        return int(self.rows[-1, TOTAL])


def key_of(address: Sequence[int]) -> SampleKey:
    """Return the key of the sample at an address."""
    stream, pass_, number = map(int, address[:START])
    return stream, pass_, number


def check_piece(
    address: Sequence[int],
    again: ReplayedSample,
    held: SampleBuffer,
    streams: Sequence[IterableStream],
) -> None:
    """Raise a DataError if the piece at a saved address has changed."""
    start, length = map(int, address[START : START + 2])
    if [start, length] not in again.rows[:, START:TOTAL].tolist():
        were = f"{length}" if not start else f"{length} that follow its first {start}"
        what = f"has {len(again.ready.tokens)} tokens, of which the state holds {were}"
        raise _changed(again, what, streams)
    if held.digest(again.ready, start, length, again.total) != address[DIGEST]:
        raise _changed(again, OTHERWISE, streams)


def check_whole(
    digest: int, again: ReplayedSample, held: SampleBuffer, streams: Sequence[IterableStream]
) -> None:
    """Raise a DataError if a partly sliced sample has changed."""
    if held.whole_digest(again.ready) != digest:
        raise _changed(again, OTHERWISE, streams)


def _changed(again: ReplayedSample, what: str, streams: Sequence[IterableStream]) -> DataError:
    stream, pass_, number = again.key
    where = streams[stream].where(number)
    return DataError(f"{where} of pass {pass_} {what}{SAME_SAMPLES}")
