"""Read buffered samples again on resume, and check that they have not changed.

::

    state     address of a piece, its digest  --.
    source    the sample, read again            +--> buffered again, or a DataError that names it

Without this check, a changed source would give rows of other tokens, or another sample's tokens
under this sample's number.

Cost: that of reading up to the state's position, and of encoding the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from streampack._state import UNCHANGED
from streampack.errors import DataError, ResumeError
from streampack.online.plan import FlowPlan
from streampack.online.sample_buffer import SampleBuffer
from streampack.online.sample_buffer_kernels import DIGEST, LEFT
from streampack.online.samples import CutSample, SampleKey
from streampack.online.source_slice import SourceSlice
from streampack.pack.buffered import rooms
from streampack.streams import IterableStream
from streampack.streams.source_traits import own_copy
from streampack.types import LENGTH, START, TOTAL, Int64Array, State

SAME_SAMPLES = (
    "; a source must give the same samples in the same order each time: pass it, and its "
    "tokenizer, as they were, or start again without the state"
)
OTHERWISE = "has other tokens, labels or fields than when the state was saved"


def read_again(
    slice_: SourceSlice, position: tuple[int, int], base: State, wanted: Collection[tuple[int, int]]
) -> list[tuple[int, int, Any]]:
    """Move a slice to a position; return the pass, number and item of the wanted samples.

    A position is a pass, and the items taken of it; a wanted sample is a pass and a number. Unless
    the source has an index, it is read from `base` on; see `SourceSlice.base`.
    """
    if slice_.has_index:
        slice_.begin(*position)
        return [(pass_, number, own_copy(slice_.get(number))) for pass_, number in wanted]
    slice_.resume(base)
    found: list[tuple[int, int, Any]] = []
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
        elif (items.pass_, items.numbers[0]) in wanted:
            found.append((items.pass_, items.numbers[0], own_copy(items.values[0])))
    return found


def key_of(address: Sequence[int]) -> SampleKey:
    """Return the key of the sample at an address."""
    stream, pass_, number = map(int, address[:START])
    return stream, pass_, number


def check_piece(
    address: Sequence[int], again: CutSample, held: SampleBuffer, streams: Sequence[IterableStream]
) -> None:
    """Raise a DataError if the piece at a saved address has changed."""
    start, length = map(int, address[START : START + 2])
    if [start, length] not in again.rows[:, START:TOTAL].tolist():
        were = f"{length}" if not start else f"{length} that follow its first {start}"
        what = f"has {len(again.ready.tokens)} tokens, of which the state holds {were}"
        raise changed_source(again, streams, what)
    if held.digest(again.ready, start, length, again.total) != address[DIGEST]:
        raise changed_source(again, streams)


def check_packs(
    lanes: Sequence[Sequence[Int64Array]], held: Sequence[Sequence[int]], plan: FlowPlan
) -> None:
    """Refuse packs that are too long, and segments that are not the pieces at addresses `held`.

    `lanes` are the packs of each packer, the segments in its buffer last. The kernels that copy
    tokens rely on both.
    """
    rows = sorted(np.concatenate([pack for packs in lanes for pack in packs]).tolist())
    packed, left = Counter[SampleKey](), Counter[SampleKey]()
    for row in rows:
        packed[key_of(row)] += row[LENGTH]
    for address in held:
        left[key_of(address)] += int(address[LEFT])
    ends = [[*row[:START], row[START] + row[LENGTH]] for row in rows]
    is_overlap = any(end > row for end, row in zip(ends, rows[1:], strict=False))
    multiple = plan.packing.pad_to_multiple or 1
    is_long = plan.bucketing is None and any(
        rooms(pack, multiple)[:, LENGTH].sum() > plan.packing.max_seq_len
        for *packs, _ in lanes
        for pack in packs
    )
    if packed != left or is_overlap or is_long or any(row[LENGTH] < 1 for row in rows):
        raise ResumeError(f"the state's packs do not go with its buffered samples; {UNCHANGED}")


def changed_source(
    again: CutSample, streams: Sequence[IterableStream], what: str = OTHERWISE
) -> DataError:
    """Return the error of a sample that is not what it was when the state was saved."""
    stream, pass_, number = again.key
    where = streams[stream].where(number)
    return DataError(f"{where} of pass {pass_} {what}{SAME_SAMPLES}")
