"""Samples of iterables in columns, their extra fields, and where they are cut into segments.

::

    tokens 5 6 7     labels, mask    image of 2 slots       as decoded
    BOS 5 6 7 EOS . .                                       as packed: `length` is 7
    0 ............. 7                one segment, or pieces of at most a pack, no payload cut

Cost: about 10 ns per sample; with extra fields about 20 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from streampack.config import Packing
from streampack.errors import DataError
from streampack.pack import fit_samples
from streampack.streams import IterableSample
from streampack.types import LENGTH, NUM_COLUMNS, START, TOTAL, Int64Array

Columns: TypeAlias = list[list[Any]]
"""Of some samples: token ids, labels, loss masks, and `Extras`, each None where a sample has none.
Labels and masks are empty lists if no stream of the dataset has them, and so are extras."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """The extra fields of a sample, or of a piece of one."""

    token_fields: dict[str, Any]
    """Arrays with one value per token."""
    payloads: dict[str, list[tuple[Any, int, int]]]
    """Objects, each with its span: first token, and one past the last."""
    num_slots: int = 0
    """Token slots that the payloads take behind the sample's own tokens."""
    ends: tuple[int, ...] = ()
    """Where the pieces of a sample end that is longer than a pack and has payloads."""

    def slice(self, start: int, stop: int) -> Extras:
        """Return the extras of tokens [start, stop), a payload with its first token."""
        return Extras(
            token_fields={k: v[start:stop].copy() for k, v in self.token_fields.items()},
            payloads={
                name: [(o, a - start, b - start) for o, a, b in objects if start <= a < stop]
                for name, objects in self.payloads.items()
            },
        )


def extras_of(
    sample: IterableSample, length: int, packing: Packing, where: str, *, may_split: bool
) -> Extras:
    """Return the extra fields of a sample of `length` tokens, with BOS, EOS and slots of payloads.

    A DataError names one that does not fit a pack and may not be cut, or has a span longer than a
    pack; `where` describes the sample. Such a sample is cut only between spans.
    """
    lead = int(packing.bos_id is not None and sample.tokens[0] != packing.bos_id)
    payloads = {
        name: [
            (thing, int(span[0]) + lead, int(span[1]) + lead)
            for thing, span in zip(objects, sample.spans[name], strict=True)
        ]
        if name in sample.spans
        else [(thing, 0, length) for thing in objects]
        for name, objects in sample.payloads.items()
    }
    around = (lead, length - lead - len(sample.tokens))
    spans = [(a, b) for objects in payloads.values() for _, a, b in objects]
    ends: tuple[int, ...] = ()
    if length > packing.max_seq_len and spans and packing.overflow in ("split", "truncate"):
        where = f"{where} of {length} tokens"
        if packing.overflow == "split" and not may_split:
            raise DataError(
                f"{where} has payloads, so it is not cut, and does not fit max_seq_len="
                f"{packing.max_seq_len}; set split_payloads=True in its stream, overflow to "
                "truncate or drop, or raise max_seq_len"
            )
        ends = _cuts(length, packing, spans, where)
        if packing.overflow == "truncate":
            ends = ends[:1]
    return Extras(
        token_fields={k: np.pad(values, around) for k, values in sample.token_fields.items()},
        payloads=payloads,
        num_slots=sample.extra_cost,
        ends=ends,
    )


def _cuts(
    length: int, packing: Packing, spans: list[tuple[int, int]], where: str
) -> tuple[int, ...]:
    """Return the ends of pieces that each fit a pack; no span is cut."""
    size, multiple = packing.max_seq_len, packing.pad_to_multiple or 1
    ends: list[int] = []
    start = 0
    while start < length:
        end = min(start + size, length)
        # Spans may overlap, so a cut moved out of one span may fall into another.
        while cut := [a for a, b in spans if a < end < b]:
            # Only a sample's last piece may need padding, so the others end at a multiple.
            end = start + (min(cut) - start) // multiple * multiple
        if end <= start:
            longest = max(b - a for a, b in spans)
            raise DataError(
                f"{where} has a payload that stands for up to {longest} tokens, which no pack of "
                f"max_seq_len={size} can take uncut where pieces end at multiples of {multiple}; "
                "raise max_seq_len"
            )
        ends.append(end)
        start = end
    return tuple(ends)


def segments_of(
    rows: Int64Array, extras: Sequence[Extras | None], packing: Packing, names: Sequence[str]
) -> Int64Array:
    """Return the segments of sample rows, shape (n, 4), in order, shape (m, 6)."""
    size, overflow = packing.max_seq_len, packing.overflow
    if not any(each is not None and each.ends for each in extras):
        return fit_samples(rows, size, overflow, names)
    parts = []
    for index, each in enumerate(extras):
        part = fit_samples(rows[index : index + 1], size, overflow, names)
        if each is not None and each.ends:
            part = np.empty((len(each.ends), NUM_COLUMNS), np.int64)
            part[:, :START] = rows[index, :START]
            part[:, START] = (0, *each.ends[:-1])
            part[:, LENGTH] = each.ends - part[:, START]
            part[:, TOTAL] = each.ends[-1]
        parts.append(part)
    return np.concatenate(parts)
