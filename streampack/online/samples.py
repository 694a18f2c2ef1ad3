"""Encode an iterable's sample for packing, and cut it into segments.

::

    tokens 5 6 7    labels, mask    image of 2 slots
    BOS 5 6 7 EOS . .                 tokens
    5 6 7 EOS -100 -100 -100          labels, shifted
    0 ........... 7                   one segment, or pieces of at most a pack, no payload cut

Cost: about 25 us per sample. Samples of tokens alone that fit a pack take a faster path; see
`SampleBuffer.extend`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from streampack.config import Packing
from streampack.errors import DataError
from streampack.online.sample_buffer_kernels import encode
from streampack.pack import fit_samples
from streampack.special_ids import encoded_length, special_ids
from streampack.streams import IterableSample
from streampack.types import IGNORED, Int64Array

SampleKey = tuple[int, int, int]  # stream, pass, sample
PLACE_BYTES = 24  # row, first token and one past the last, in int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extras:
    """The extra fields of a sample, or of a piece of one."""

    token_fields: dict[str, Any]
    """Arrays with one value per token."""
    payloads: dict[str, list[tuple[Any, int, int]]]
    """Objects, each with its span: first token, and one past the last."""

    def slice(self, start: int, stop: int) -> Extras:
        """Return the extras of tokens [start, stop), a payload with its first token."""
        return Extras(
            token_fields={k: v[start:stop].copy() for k, v in self.token_fields.items()},
            payloads={
                name: [(o, a - start, b - start) for o, a, b in objects if start <= a < stop]
                for name, objects in self.payloads.items()
            },
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payloads and of their spans in a batch."""
        things = [thing for each in self.payloads.values() for thing, _, _ in each]
        return num_bytes(things) + PLACE_BYTES * len(things)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedSample:
    """A sample as it will be packed."""

    tokens: Int64Array
    """Shape (n,)."""
    labels: Int64Array
    """Shifted, shape (n,)."""
    extras: Extras | None


class CutSample(NamedTuple):
    """A sample as it will be packed, and where it is cut."""

    key: SampleKey
    ready: EncodedSample
    rows: Int64Array
    """Its segments, shape (n, 6); none if it is dropped."""
    total: int
    """Tokens of it that are packed."""


def num_bytes(thing: Any) -> int:
    """Return the bytes of a payload.

    Arrays and tensors count their values, images (such as PIL's) a byte per pixel and band, and
    containers their contents. Anything else counts `sys.getsizeof`, which may be too little.

    >>> num_bytes(np.zeros((2, 3), np.float32)), num_bytes([b"ab", b"c"]) == 2 * sys.getsizeof(b"")
    (24, False)
    """
    nbytes = getattr(thing, "nbytes", None)
    if isinstance(nbytes, int | np.integer):
        return int(nbytes)
    if isinstance(thing, Mapping):
        return sum(map(num_bytes, thing.values()))
    if isinstance(thing, list | tuple):
        return sum(map(num_bytes, thing))
    if hasattr(thing, "getbands") and hasattr(thing, "size"):
        width, height = thing.size
        return int(width * height * len(thing.getbands()))
    return sys.getsizeof(thing)


def prepare(sample: IterableSample, packing: Packing, *, labels_shifted: bool) -> EncodedSample:
    """Return a sample with BOS, EOS, the token slots of its payloads, and shifted labels.

    >>> sample = IterableSample(tokens=np.array([5, 6]), labels=None, loss_mask=None, extra_cost=2)
    >>> ready = prepare(sample, Packing(max_seq_len=8, padding_id=9), labels_shifted=False)
    >>> ready.tokens.tolist(), ready.labels.tolist()
    ([5, 6, 9, 9], [6, -100, -100, -100])
    """
    length = encoded_length(sample.tokens, packing)
    whole = length + sample.extra_cost
    tokens = np.full(whole, packing.padding_id, np.int64)
    labels = np.full(whole, IGNORED, np.int64)
    arrays = (sample.tokens, sample.labels, sample.loss_mask)
    # Copied, because the kernel is compiled for writable contiguous arrays.
    own, targets, mask = [np.array([] if each is None else each, np.int64) for each in arrays]
    ids = special_ids(packing)
    encode(own, (targets, mask), labels_shifted, ids, tokens[:length], labels[:length])
    lead = int(packing.bos_id is not None and own[0] != packing.bos_id)
    payloads = {
        name: [
            (thing, int(span[0]) + lead, int(span[1]) + lead)
            for thing, span in zip(objects, sample.spans[name], strict=True)
        ]
        if name in sample.spans
        else [(thing, 0, whole) for thing in objects]
        for name, objects in sample.payloads.items()
    }
    around = (lead, whole - lead - len(own))
    fields = {name: np.pad(values, around) for name, values in sample.token_fields.items()}
    extras = Extras(token_fields=fields, payloads=payloads) if fields or payloads else None
    return EncodedSample(tokens=tokens, labels=labels, extras=extras)


def segment_rows(
    key: SampleKey, ready: EncodedSample, packing: Packing, names: Sequence[str], *, may_split: bool
) -> Int64Array:
    """Return a sample's segments, shape (n, 6); none if it is dropped.

    A sample with payloads is cut only between their spans, and only if `may_split`. A DataError
    names one that does not fit a pack and may not be cut, or has a span longer than a pack.
    """
    length, size = len(ready.tokens), packing.max_seq_len
    payloads = ready.extras.payloads if ready.extras is not None else {}
    spans = [(a, b) for objects in payloads.values() for _, a, b in objects]
    if length <= size or not spans or packing.overflow in ("drop", "error"):
        return fit_samples(np.array([[*key, length]], np.int64), size, packing.overflow, names)
    where = f"stream {names[key[0]]!r}, sample {key[2]} of {length} tokens"
    if packing.overflow == "split" and not may_split:
        raise DataError(
            f"{where} has payloads, so it is not cut, and does not fit max_seq_len={size}; set "
            "split_payloads=True in its stream, overflow to truncate or drop, or raise max_seq_len"
        )
    ends = _cuts(length, packing, spans, where)
    if packing.overflow == "truncate":
        ends = ends[:1]
    starts = [0, *ends[:-1]]
    rows = [[*key, start, end - start, ends[-1]] for start, end in zip(starts, ends, strict=True)]
    return np.array(rows, np.int64)


def _cuts(length: int, packing: Packing, spans: list[tuple[int, int]], where: str) -> list[int]:
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
    return ends
