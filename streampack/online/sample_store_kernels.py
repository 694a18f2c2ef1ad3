"""Kernels of the sample store: encode samples, keep those that wait, and copy packs into rows.

::

    samples  number offset from to                           a line a sample, in order of arrival
    tokens   | a a a a | b b | c c c c c c | ...             sample c: `offset` is its token 0
    kept     | a a | c c c |                                 only its tokens `from` to `to`

They share a file, because numba's disk cache does not notice a changed callee in another one.

Cost: about 20 ns per sample, a copy of its tokens, and about 1 ns per token for the digest.
"""

from __future__ import annotations

from streampack._checks import MAX_ID
from streampack._numba import compiled
from streampack.special_ids import NO_ID
from streampack.types import (
    IGNORED,
    LENGTH,
    SAMPLE,
    START,
    STREAM,
    TOKENS,
    TOTAL,
    BoolArray,
    Int32Array,
    Int64Array,
    IntArray,
)

NUMBER, OFFSET, FROM, TO = range(4)
NUM_PLACE = 4
FACTOR = 6364136223846793005  # Knuth's MMIX multiplier: its powers repeat only after 2**62
# Its powers in int64 (products wrap): four tokens are mixed in without waiting for each other.
FACTOR_2, FACTOR_3, FACTOR_4 = (
    (pow(FACTOR, power, 1 << 64) ^ (1 << 63)) - (1 << 63) for power in (2, 3, 4)
)


@compiled
def _copy(source: IntArray, out: IntArray) -> None:
    """Copy tokens, shape (n,), front to back; slices as arguments let LLVM vectorise the loop."""
    for i in range(len(source)):
        out[i] = source[i]


@compiled
def _fill(out: Int32Array, value: int) -> None:
    """Set all of a slice, shape (n,), to a value."""
    for i in range(len(out)):
        out[i] = value


@compiled
def _mix(mixed: int, values: IntArray) -> int:
    """Return `mixed` times FACTOR plus the value, for one value after another, shape (n,)."""
    num_fours = len(values) // 4
    for i in range(num_fours):
        a, b, c, d = values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]
        mixed = mixed * FACTOR_4 + (a * FACTOR_3 + b * FACTOR_2 + (c * FACTOR + d))
    for i in range(4 * num_fours, len(values)):
        mixed = mixed * FACTOR + values[i]
    return mixed


@compiled
def _range(tokens: IntArray) -> tuple[int, int]:
    """Return the minimum, at most 0, and the maximum, at least 0."""
    smallest = largest = 0
    for i in range(len(tokens)):
        smallest, largest = min(smallest, tokens[i]), max(largest, tokens[i])
    return smallest, largest


@compiled
def _encode_sample(
    own: IntArray,
    targets: tuple[IntArray, IntArray],
    shifted: bool,
    ids: tuple[int, int, int],
    tokens: IntArray,
    labels: IntArray,
    is_in_place: bool,
) -> bool:
    """Write a sample's tokens, with BOS and EOS where they are missing, and its shifted labels.

    A token is a target if the labels and the loss mask allow it. An added EOS is a target if the
    token before it is. Arguments as in `encode`, but for one sample; `labels` may be empty: they
    are not wanted. Return whether all token ids are valid and all labels are within int32.
    """
    own_labels, mask = targets
    num = len(own)
    lead = 1 if ids[0] != NO_ID and own[0] != ids[0] else 0
    tokens[0] = ids[0] if lead else tokens[0]
    if not is_in_place:
        _copy(own, tokens[lead : lead + num])
    smallest, largest = _range(own)
    is_valid = smallest >= 0 and largest <= MAX_ID
    if lead + num < len(tokens):
        tokens[lead + num] = ids[1]
    if not len(labels):
        return is_valid
    target = own[num - 1]
    for i in range(num):
        if not len(own_labels):
            target = own[i]
        elif shifted:
            target = own_labels[i - 1] if i else IGNORED
        else:
            target = own_labels[i]
        if len(mask) and mask[i] == 0:
            target = IGNORED
        if lead + i:
            labels[lead + i - 1] = target
    after = own_labels[num - 1] if len(own_labels) and shifted else IGNORED
    if lead + num < len(tokens):  # an EOS was added: a target if the token before it is one
        last = after if len(own_labels) and shifted else target
        labels[lead + num - 1] = ids[1] if last != IGNORED else IGNORED
        after = IGNORED
    labels[len(tokens) - 1] = after
    smallest, largest = _range(own_labels)
    return is_valid and smallest >= -MAX_ID and largest <= MAX_ID


@compiled
def encode(
    room: tuple[Int32Array, Int32Array],
    samples: tuple[Int64Array, Int64Array, BoolArray],
    own: tuple[Int32Array, Int32Array, Int32Array],
    digests: tuple[Int64Array, Int64Array],
    ids: tuple[int, int, int],
    is_in_place: bool,
) -> int:
    """Encode samples, one behind the other.

    Args:
        room: Tokens and labels from the first sample on; empty labels: they follow from the tokens.
        samples: Rows of stream, pass, number and length, shape (n, 4); how many own tokens,
            labels, values of a loss mask, and slots of payloads each has, shape (n, 4); and whether
            labels[i] is the target of token i + 1, for each stream.
        own: Tokens, labels and loss masks of all samples, one sample after another.
        digests: Digest so far of each stream, updated with tokens and labels; and a hash of what
            else each sample has, shape (n,).
        ids: BOS and EOS, NO_ID: none; and the token of payload slots.
        is_in_place: The own tokens are where they belong already.

    Returns:
        The index of the first sample with an invalid token id or label; n: all are valid.
    """
    (tokens, labels), (rows, sizes, are_shifted) = room, samples
    own_tokens, own_labels, own_mask = own
    offset, at_token, at_label, at_mask, first_bad = 0, 0, 0, 0, len(rows)
    for i in range(len(rows)):
        num, num_labels, num_mask, num_slots = sizes[i]
        end = offset + rows[i, TOKENS]
        begin_slots = end - num_slots
        targets = (
            own_labels[at_label : at_label + num_labels],
            own_mask[at_mask : at_mask + num_mask],
        )
        is_valid = _encode_sample(
            own_tokens[at_token : at_token + num],
            targets,
            are_shifted[rows[i, STREAM]],
            ids,
            tokens[offset:begin_slots],
            labels[offset:begin_slots] if len(labels) else labels,
            is_in_place,
        )
        if not is_valid and first_bad == len(rows):
            first_bad = i
        _fill(tokens[begin_slots:end], ids[2])
        totals = digests[0]
        mixed = _mix(totals[rows[i, STREAM]] * FACTOR + digests[1][i], tokens[offset:end])
        if len(labels):
            _fill(labels[begin_slots:end], IGNORED)
            mixed = _mix(mixed, labels[offset:end])
        totals[rows[i, STREAM]] = mixed * FACTOR + begin_slots - offset
        offset = end
        at_token, at_label, at_mask = at_token + num, at_label + num_labels, at_mask + num_mask
    return first_bad


@compiled
def keep(
    places: Int64Array,
    first: int,
    segments: Int64Array,
    used: int,
    tokens: Int32Array,
    labels: Int32Array,
) -> int:
    """Move the tokens of segments to the front, and return how many of `used` tokens are left.

    `places` are the samples from serial number `first` on, in the order of their tokens, so nothing
    that is kept is overwritten. Of each sample, what is between its segments stays too. Nothing is
    moved while most tokens stay: the rest of a long sample would be moved with every window.
    """
    places[:, FROM:] = 0
    live = 0
    for segment in range(len(segments)):
        place = places[segments[segment, SAMPLE] - first]
        start = segments[segment, START]
        end = start + segments[segment, LENGTH]
        if end < segments[segment, TOTAL]:
            end += 1  # the target of its last token
        live -= place[TO] - place[FROM]
        place[FROM] = min(place[FROM], start) if place[TO] else start
        place[TO] = max(place[TO], end)
        live += place[TO] - place[FROM]
    if 2 * live > used:
        return used
    used = 0
    for sample in range(len(places)):
        place = places[sample]
        begin, size = place[OFFSET] + place[FROM], place[TO] - place[FROM]
        _copy(tokens[begin : begin + size], tokens[used : used + size])
        if len(labels):
            _copy(labels[begin : begin + size], labels[used : used + size])
        place[OFFSET] = used - place[FROM]
        used += size
    return used


@compiled
def copy_to_rows(
    held: tuple[Int64Array, int, Int32Array, Int32Array],
    packs: tuple[Int64Array, Int64Array, Int64Array],
    own: int,
    multiple: int,
    padding_id: int,
    made: tuple[Int32Array, Int32Array, Int64Array, Int64Array],
) -> None:
    """Copy the packs of one queue into their rows.

    Args:
        held: Places of samples, serial number of the first, tokens, and labels; empty labels: they
            follow from the tokens.
        packs: Segments with serial numbers of samples, shape (n, 6); the end of each pack, and its
            queue, shape (num_packs,).
        own: The queue.
        multiple: Each segment is padded to a multiple of this many tokens.
        padding_id: Token of the padding; its label is IGNORED.
        made: Outputs: tokens and labels, shape (B, S); the token after each segment, shape (n,);
            and the number of each segment's sample and its place in the row, shape (n, 2).
    """
    (places, first, tokens, labels), (segments, ends, queues) = held, packs
    out_tokens, out_labels, nexts, found = made
    segment = 0
    for row in range(len(ends)):
        filled = 0
        if queues[row] != own:
            segment = ends[row]
            continue
        while segment < ends[row]:
            place = places[segments[segment, SAMPLE] - first]
            start, size = segments[segment, START], segments[segment, LENGTH]
            begin, stop = place[OFFSET] + start, filled + size
            end, padded = begin + size, stop + -size % multiple
            found[segment, 0], found[segment, 1] = place[NUMBER], filled
            _copy(tokens[begin:end], out_tokens[row, filled:stop])
            _fill(out_tokens[row, stop:padded], padding_id)
            if len(labels):
                _copy(labels[begin:end], out_labels[row, filled:stop])
                _fill(out_labels[row, stop:padded], IGNORED)
            is_last = start + size == segments[segment, TOTAL]
            nexts[segment] = IGNORED if is_last else tokens[end]
            filled, segment = padded, segment + 1
        _fill(out_tokens[row, filled:], padding_id)
        if len(labels):
            _fill(out_labels[row, filled:], IGNORED)
