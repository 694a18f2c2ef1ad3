"""Read buffered samples again on resume, and check that they have not changed.

::

    state     address of a piece, its digest  --.
    source    the sample, reread            +--> buffered again, or a DataError that names it

Without this check, a changed source would give rows of other tokens, or another sample's tokens
under this sample's number.

Cost: that of reading up to the state's position, and of encoding the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streampack.errors import DataError
from streampack.online.samples import SampleKey
from streampack.online.source_slice import SourceSlice
from streampack.streams import IterableStream
from streampack.streams.source_traits import own_copy
from streampack.types import START, Int64Array, State

SAME_SAMPLES = (
    "; a source must give the same samples in the same order each time: pass it, and its "
    "tokenizer, as they were, or start again without the state"
)


def read_again(
    slice_: SourceSlice, position: tuple[int, int], base: State, wanted: Sequence[tuple[int, int]]
) -> list[Any]:
    """Move a slice to a position; return the wanted items.

    A position is a pass, and the items taken of it; a wanted sample is a pass and a number. Unless
    the source has an index, it is read from `base` on; see `SourceSlice.base`. A DataError names a
    sample that is not there.
    """
    if slice_.has_index:
        slice_.begin(*position)
        return [own_copy(slice_.get(number)) for _, number in wanted]
    slice_.resume(base)
    missing, found = set(wanted), {}
    while (slice_.pass_, slice_.taken) < position:
        items = slice_.read()
        if items is None:
            pass_, taken = position
            if slice_.pass_ >= pass_:
                raise DataError(
                    f"stream {slice_.name!r}: the state is {taken} samples into pass {pass_}, but "
                    f"the source gave {slice_.taken}{SAME_SAMPLES}"
                )
            slice_.begin(slice_.pass_ + 1)
        elif (key := (items.pass_, items.numbers[0])) in missing:
            missing.remove(key)
            found[key] = own_copy(items.values[0])
    for pass_, number in sorted(missing):
        raise DataError(
            f"stream {slice_.name!r}: the state holds sample {number} of pass {pass_}, which the "
            f"source does not give again{SAME_SAMPLES}"
        )
    return [found[key] for key in wanted]


def key_of(address: Sequence[int] | Int64Array) -> SampleKey:
    """Return the key of the sample at an address."""
    stream, pass_, number = map(int, address[:START])
    return stream, pass_, number


def changed_source(address: Sequence[int], streams: Sequence[IterableStream]) -> DataError:
    """Return the error of a saved address with other contents now, or with another length."""
    stream, pass_, number = key_of(address)
    return DataError(
        f"{streams[stream].where(number)} of pass {pass_} has other tokens, labels or fields than "
        f"when the state was saved{SAME_SAMPLES}"
    )
