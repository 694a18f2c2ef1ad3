"""Copy token values of any integer type and alignment from mapped shards into rows of one type.

One pack of two segments, with ``bos_id=1`` and S = 8::

    segment  A: start 0, length 4, total 6        B: start 0, length 3, total 3
    bytes    .. a0 a1 a2 a3 a4 ..                 .. b0 b1 ..
    tokens   1 a0 a1 a2  1 b0 b1  0               a BOS before each sample, then padding
    next     a3          -100                     A is cut there, B ends

An *address row* contains the addresses of a shard, with the columns below. Addresses are read only
after their bounds are checked against the mapped bytes. A sample out of bounds is reported, never
read.

streams/label_shift.py defines the meaning of labels. Rows are int32, or uint16 if the ids of all
streams fit; a value that does not fit is reported, never truncated.

Samples are scattered over their shards. So all are located first, and memory is prefetched at a
constant distance ahead. Otherwise the processor stalls on the first lines of each sample, which
doubles the time on the lengths of web text.

Cost: one pass over the bytes, 0.5 ns per token and 40 ns per segment from the page cache; labels
columns as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from streampack._numba import compiled, compiled_inline
from streampack.types import IGNORED, LENGTH, SAMPLE, START, STREAM, TOTAL, Int64Array, IntArray

# Inputs: segment rows, shape (n, 6); one past the last segment of each pack, (num_packs,); address
# rows of open shards, (m, ROW_COLUMNS); the address row of each segment, (n,), from `find_rows`;
# and the options of each stream, (num_streams, 5): BOS and EOS ids or -1, padding id, 1 if samples
# may be truncated, and the multiple of slots that each segment takes.
Reading: TypeAlias = tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]
# For a sample: its own tokens, and 1 or 0 for an added BOS and an added EOS.
PackShape: TypeAlias = tuple[int, int, int]
# Location of each segment's values, (n, FOUND_COLUMNS); and the prefetch position, (3,): the next
# segment, how many of its bytes were prefetched, and how many bytes too early.
FoundRows: TypeAlias = tuple[Int64Array, Int64Array]

# Columns of an address row: the shard's bytes, then three columns of it, two numbers each.
DATA, SIZE, FIRST, COUNT, SHIFTED, TOKENS, LABELS, LOSS_MASK = 0, 1, 2, 3, 4, 5, 7, 9
MASK_DATA, MASK_SIZE = 11, 12  # the bytes of the loss mask, which may be in another file
ROW_COLUMNS = 13
# The address of the (offset, count) table of samples, int64, (COUNT, 2), and the type code. Both
# numbers of a sample are in one cache line.
SAMPLES, CODE = 0, 1
NO_COLUMN = -1
SAMPLE_BYTES = 16
# Columns of a location: address of the sample's values, their number, bytes of each.
ADDRESS, VALUES, WIDTH = 0, 1, 2
FOUND_COLUMNS = 3
# numba compiles a function again for a constant argument, unless it is a numpy scalar.
FIRST_VALUE = cast(int, np.int64(0))
# Prefetch distance, size of each copied piece, cache line.
AHEAD_BYTES, PIECE_BYTES, LINE_BYTES = 8192, 4096, 64
LEAST = -(1 << 31)  # of int32

# Columns of the options.
BOS, EOS, PADDING, TRUNCATES, MULTIPLE = 0, 1, 2, 3, 4

# Error codes of a segment.
FINE, BAD_SAMPLE, BAD_BYTES, BAD_LENGTH, BAD_RANGE, BAD_ROW, BAD_COLUMN, BAD_VALUE = range(8)
BAD_MASK = 8

UINT8, INT8, UINT16, INT16, UINT32, INT32, INT64 = range(7)  # code >> 1 is log2 of the bytes
_CODES = {"u1": UINT8, "b1": UINT8, "i1": INT8, "u2": UINT16, "i2": INT16, "u4": UINT32}
_CODES |= {"i4": INT32, "i8": INT64, "u8": INT64}


def code_of(dtype: npt.DTypeLike) -> int:
    """Return the type code of an integer or bool type in native byte order, or NO_COLUMN.

    >>> code_of("uint16") == UINT16, code_of("float32") == NO_COLUMN
    (True, True)
    """
    known = np.dtype(dtype)
    return _CODES.get(known.str[1:], NO_COLUMN) if known.isnative else NO_COLUMN


def room_for(num_segments: int) -> FoundRows:
    """Return arrays for the locations of this many segments."""
    return np.empty((num_segments, FOUND_COLUMNS), np.int64), np.empty(3, np.int64)


def _reader(kind: Any) -> Any:
    """Return an intrinsic (address, index) -> int64 that reads one value at any alignment."""

    def read(_typing: Any, _address: Any, _index: Any) -> tuple[Any, Callable[..., Any]]:
        """Type the intrinsic, and return the generator of its code."""

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            address, index = arguments
            pointer = builder.inttoptr(address, context.get_value_type(kind).as_pointer())
            place = cgutils.gep_inbounds(builder, pointer, index)
            # align=1: samples begin at any byte; the compiler still vectorises such loads.
            value = builder.load(place, align=1)
            return context.cast(builder, value, kind, types.int64)

        return types.int64(types.int64, types.int64), generate

    return intrinsic(read)


_read_uint8, _read_int8 = _reader(types.uint8), _reader(types.int8)
_read_uint16, _read_int16 = _reader(types.uint16), _reader(types.int16)
_read_uint32, _read_int32 = _reader(types.uint32), _reader(types.int32)
_read_int64 = _reader(types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_typing: Any, _address: Any) -> tuple[Any, Callable[..., Any]]:
    """Prefetch the cache line at an address; any address is safe, since nothing is read."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, number, number, number]),
            "llvm.prefetch.p0",
        )
        # Read access, second-level data cache: the first is smaller than the prefetch distance.
        options = [number(0), number(2), number(1)]
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *options])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@compiled
def value_at(address: int, code: int, index: int) -> int:
    """Return value `index` of the values at `address`."""
    if code == UINT8:
        return _read_uint8(address, index)  # type: ignore[no-any-return]
    if code == INT8:
        return _read_int8(address, index)  # type: ignore[no-any-return]
    if code == UINT16:
        return _read_uint16(address, index)  # type: ignore[no-any-return]
    if code == INT16:
        return _read_int16(address, index)  # type: ignore[no-any-return]
    if code == UINT32:
        return _read_uint32(address, index)  # type: ignore[no-any-return]
    if code == INT32:
        return _read_int32(address, index)  # type: ignore[no-any-return]
    return _read_int64(address, index)  # type: ignore[no-any-return]


@compiled
def _copy_int32(start: int, out: IntArray) -> int:
    """Copy ``len(out)`` int32 values; return their OR."""
    seen = np.int32(0)
    for i in range(len(out)):
        value = _read_int32(start, i)
        out[i] = value
        seen = np.int32(seen | value)  # in 32 bits: twice as many per instruction
    return int(seen)


@compiled
def copy_values(address: int, code: int, first: int, out: IntArray, lowest: int) -> bool:
    """Copy ``len(out)`` values, starting with value `first` of those at `address`.

    Returns whether all are at least `lowest` (0, or `LEAST` with `out` of int32) and fit in `out`.
    """
    start = address + (first << (code >> 1))
    # A value in 0 to 2**n - 1 has no bit set from n on, including the sign; the same is true of the
    # OR of all values. One loop per common type, so that each compiles to vector instructions.
    seen = 0
    if code == INT32:
        seen = _copy_int32(start, out) - lowest
    elif code == UINT16:
        for i in range(len(out)):
            out[i] = _read_uint16(start, i)
    elif code == UINT32:
        for i in range(len(out)):
            value = _read_uint32(start, i)
            out[i] = value
            seen |= value - lowest
    elif code == INT64:
        for i in range(len(out)):
            value = _read_int64(start, i)
            out[i] = value
            seen |= value - lowest
    else:
        for i in range(len(out)):
            value = value_at(start, code, i)
            out[i] = value
            seen |= value - lowest
    num_bits = 32 if lowest < 0 else min(8 * out.itemsize, 31)
    return bool(seen >> num_bits == 0)


@compiled_inline
def locate(shard: Int64Array, column: int, sample: int) -> tuple[int, int, int]:
    """Return (address, values, problem) of one column of a sample; the address is safe to read."""
    index = sample - shard[FIRST]
    if index < 0 or index >= shard[COUNT]:
        return 0, 0, BAD_SAMPLE
    begin = _read_int64(shard[column + SAMPLES], 2 * index)
    count = _read_int64(shard[column + SAMPLES], 2 * index + 1)
    is_mask = column == LOSS_MASK
    data, size = shard[MASK_DATA if is_mask else DATA], shard[MASK_SIZE if is_mask else SIZE]
    code = shard[column + CODE]
    # Compare by division: a forged count times its width could overflow int64 and look small.
    if begin < 0 or begin > size or count < 1 or count > (size - begin) >> (code >> 1):
        return 0, 0, BAD_BYTES
    return data + begin, count, FINE


@compiled_inline
def sample_edges(address: int, code: int, count: int, options: Int64Array) -> tuple[int, int]:
    """Return 1 or 0 for a BOS and for an EOS to add to a sample."""
    bos, eos = options[BOS], options[EOS]
    before = 1 if bos >= 0 and value_at(address, code, FIRST_VALUE) != bos else 0
    after = 1 if eos >= 0 and value_at(address, code, count - 1) != eos else 0
    return before, after


@compiled_inline
def _check(segment: Int64Array, full: int, room: int, options: Int64Array) -> int:
    """Return the error code of a segment of a sample of `full` tokens, or FINE."""
    start, length, total = segment[START], segment[LENGTH], segment[TOTAL]
    if total != full and not (options[TRUNCATES] > 0 and total < full):
        return BAD_LENGTH
    if start < 0 or length < 1 or length > total - start:
        return BAD_RANGE
    return BAD_ROW if length > room else FINE


@compiled_inline
def _ask_ahead(segments: Int64Array, found: FoundRows, num_bytes: int) -> None:
    """Prefetch as many bytes as are copied next."""
    where, cursor = found
    k, done, wanted = cursor[0], cursor[1], num_bytes - cursor[2]
    while wanted > 0 and k < len(segments):
        width = where[k, WIDTH]
        address, size = where[k, ADDRESS] + segments[k, START] * width, segments[k, LENGTH] * width
        num_lines = (min(size - done, wanted) + LINE_BYTES - 1) // LINE_BYTES
        for line in range(num_lines):
            _prefetch(address + done + LINE_BYTES * line)
        reached = done + LINE_BYTES * num_lines
        wanted -= min(reached, size) - done
        done = reached
        if reached >= size:
            # Values may start in the middle of a line, and so end in one more.
            _prefetch(address + size)
            k, done = k + 1, 0
    cursor[0], cursor[1], cursor[2] = k, done, -wanted


@compiled_inline
def _column_to_read(shards: Int64Array, row: int, for_labels: bool) -> int:
    """Return the column that a segment's tokens or labels come from, or NO_COLUMN."""
    if not for_labels:
        return TOKENS
    # If there are both, they are adjacent.
    for column in (LABELS, LOSS_MASK):
        if shards[row, column + CODE] != NO_COLUMN:
            return column
    return NO_COLUMN


@compiled
def _locate_all(
    segments: Int64Array, shards: Int64Array, rows: Int64Array, for_labels: bool, found: FoundRows
) -> tuple[int, int]:
    """Fill `found` for all segments, and prefetch the first; return as `gather_tokens`."""
    where, cursor = found
    cursor[:] = 0
    for k in range(len(segments)):
        column = _column_to_read(shards, rows[k], for_labels)
        if column != NO_COLUMN:
            # Prefetching is safe at any address, even for a sample that does not exist.
            index = segments[k, SAMPLE] - shards[rows[k], FIRST]
            _prefetch(shards[rows[k], column + SAMPLES] + SAMPLE_BYTES * index)
    for k in range(len(segments)):
        where[k] = 0
        column = _column_to_read(shards, rows[k], for_labels)
        if column != NO_COLUMN:
            where[k, WIDTH] = 1 << (shards[rows[k], column + CODE] >> 1)
            where[k, ADDRESS], where[k, VALUES], problem = locate(
                shards[rows[k]], column, segments[k, SAMPLE]
            )
            if problem != FINE:
                return k, problem
    _ask_ahead(segments, found, AHEAD_BYTES)
    return -1, FINE


@compiled_inline
def _gather_segment(
    segments: Int64Array, k: int, code: int, options: Int64Array, room: IntArray, found: FoundRows
) -> tuple[int, int]:
    """Fill the front of `room` with segment `k`; return (next token, problem)."""
    address, count = found[0][k, ADDRESS], found[0][k, VALUES]
    before, after = sample_edges(address, code, count, options)
    problem = _check(segments[k], before + count + after, len(room), options)
    if problem != FINE:
        return IGNORED, problem
    start, length = segments[k, START], segments[k, LENGTH]
    stop = start + length
    own = max(start, before)  # from here to `own_stop`: the sample's own tokens
    own_stop = min(stop, before + count)
    if start < before:
        room[0] = options[BOS]
    piece = PIECE_BYTES >> (code >> 1)
    while own < own_stop:
        last = min(own + piece, own_stop)
        _ask_ahead(segments, found, (last - own) << (code >> 1))
        if not copy_values(address, code, own - before, room[own - start : last - start], 0):
            return IGNORED, BAD_VALUE
        own = last
    if own_stop < stop:
        room[length - 1] = options[EOS]
    if stop == segments[k, TOTAL]:
        return IGNORED, FINE
    if stop < before + count:
        return value_at(address, code, stop - before), FINE
    return options[EOS], FINE


@compiled_inline
def padding_behind(length: int, multiple: int) -> int:
    """Return the padding that rounds a segment up to a multiple."""
    return -length % multiple if multiple > 1 else 0  # usually 1; division is slow


@compiled
def gather_tokens(
    reading: Reading,
    slots: Int64Array | None,
    tokens: IntArray,
    next_tokens: Int64Array,
    found: FoundRows,
) -> tuple[int, int]:
    """Fill rows of `tokens`, shape (num_rows, S), with their segments, then padding.

    In slices of rows, `slots`, shape (n,), has each segment's first slot. None: whole rows, which
    have no padding before a segment. numba compiles a kernel for each kind: whole rows would take
    7 % longer if they looked for slots.

    `next_tokens`, shape (n,), gets the token after each segment, or IGNORED; `found` the locations.
    Returns (segment, problem) of the first bad segment; (-1, FINE) if there is none.
    """
    segments, ends, shards, rows, options = reading
    bad, problem = _locate_all(segments, shards, rows, False, found)
    if bad >= 0:
        return bad, problem
    k = 0
    for row in range(len(tokens)):
        filled = 0
        end = ends[row] if row < len(ends) else k
        while k < end:
            if slots is not None:
                tokens[row, filled : slots[k]] = options[0, PADDING]
                filled = slots[k]
            code = shards[rows[k], TOKENS + CODE]
            next_tokens[k], problem = _gather_segment(
                segments, k, code, options[segments[k, STREAM]], tokens[row, filled:], found
            )
            if problem != FINE:
                return k, problem
            stop = filled + segments[k, LENGTH]
            filled = stop + padding_behind(segments[k, LENGTH], options[0, MULTIPLE])
            tokens[row, stop:filled] = options[0, PADDING]
            k += 1
        tokens[row, filled:] = options[0, PADDING]
    return -1, FINE


@compiled
def _apply_labels(segment: Int64Array, shard: Int64Array, shape: PackShape, room: IntArray) -> int:
    """Overwrite a segment's targets with those of a labels column; return the error code.

    ``room[i]`` is for token ``start + 1 + i``; its shape is (length,).
    """
    count, before, after = shape
    address, values, problem = locate(shard, LABELS, segment[SAMPLE])
    if problem != FINE or values != count:
        return BAD_COLUMN
    code, shifted = shard[LABELS + CODE], shard[SHIFTED]
    start, stop = segment[START], segment[START] + segment[LENGTH]
    first = start + 1
    last = min(stop + 1, before + count, segment[TOTAL])
    if shifted and first == before:
        room[first - start - 1] = IGNORED
        first += 1
    targets = room[first - start - 1 : last - start - 1]
    if first < last and not copy_values(address, code, first - before - shifted, targets, LEAST):
        return BAD_VALUE
    end = before + count  # end of the own tokens: the index of an added EOS, or of the sample's end
    if stop < end or segment[TOTAL] < end:
        return FINE
    final = value_at(address, code, count - 1)
    if after == 0 and shifted:
        room[end - start - 1] = final
        if np.int64(room[end - start - 1]) != final:
            return BAD_VALUE
    elif after == 1 and start < end and segment[TOTAL] > end:
        is_target = final != IGNORED
        if shifted and count > 1:
            is_target = is_target or value_at(address, code, count - 2) != IGNORED
        if not is_target:
            room[end - start - 1] = IGNORED
    return FINE


@compiled
def _ignore_where_zero(address: int, code: int, first: int, out: IntArray) -> bool:
    """Ignore the targets in `out` where the mask is 0; return whether all are 0 or 1."""
    width = 1 << (code >> 1)
    start = address + first * width
    seen = 0
    if width == 1:  # the usual one, in a loop that vectorises
        few = np.uint8(0)
        for i in range(len(out)):
            value = _read_uint8(start, i)
            out[i] = IGNORED if value == 0 else out[i]
            few = np.uint8(few | value)
        seen = int(few)
    else:
        for i in range(len(out)):
            value = value_at(start, code, i)
            out[i] = IGNORED if value == 0 else out[i]
            seen |= value
    return bool(seen >> 1 == 0)


@compiled
def _apply_mask(segment: Int64Array, shard: Int64Array, shape: PackShape, room: IntArray) -> int:
    """Ignore the targets in `room` outside the loss mask; arguments as `_apply_labels`."""
    count, before, _ = shape
    address, values, problem = locate(shard, LOSS_MASK, segment[SAMPLE])
    if problem != FINE or values != count:
        return BAD_COLUMN
    code = shard[LOSS_MASK + CODE]
    first = segment[START] + 1 - before  # own token of room[0]
    own_stop = max(min(count - first, len(room)), 0)
    if not _ignore_where_zero(address, code, first, room[:own_stop]):
        return BAD_MASK
    # An added EOS follows the mask of the last own token.
    if own_stop < len(room) and value_at(address, code, count - 1) == 0:
        room[own_stop:] = IGNORED
    return FINE


@compiled
def _label_segment(
    segment: Int64Array, shard: Int64Array, found: Int64Array, options: Int64Array, room: IntArray
) -> int:
    """Apply the label columns of a segment's stream to its labels; return the error code."""
    has_labels = shard[LABELS + CODE] != NO_COLUMN
    has_mask = shard[LOSS_MASK + CODE] != NO_COLUMN
    if not (has_labels or has_mask):
        return FINE
    address, count = found[ADDRESS], found[VALUES]
    before, after = sample_edges(address, shard[TOKENS + CODE], count, options)
    shape, problem = (count, before, after), FINE
    if has_labels:
        problem = _apply_labels(segment, shard, shape, room)
    if has_mask and problem == FINE:
        problem = _apply_mask(segment, shard, shape, room)
    return problem


@compiled
def _copy(source: IntArray, out: IntArray) -> None:
    for i in range(len(out)):
        out[i] = source[i]


@compiled
def gather_labels(
    reading: Reading,
    slots: Int64Array | None,
    tokens: IntArray,
    next_tokens: Int64Array,
    labels: IntArray,
    found: FoundRows,
    label_locations: FoundRows,
) -> tuple[int, int]:
    """Fill rows of `labels`, shape (num_rows, S), from the results of `gather_tokens`.

    `label_locations` gets the locations of the label columns. `slots` and what is returned are as
    in `gather_tokens`.
    """
    segments, ends, shards, rows, options = reading
    bad, _ = _locate_all(segments, shards, rows, True, label_locations)
    if bad >= 0:
        return bad, BAD_COLUMN
    k = 0
    for row in range(len(labels)):
        filled = 0
        end = ends[row] if row < len(ends) else k
        while k < end:
            if slots is not None:
                labels[row, filled : slots[k]] = IGNORED
                filled = slots[k]
            stop = filled + segments[k, LENGTH]
            _copy(tokens[row, filled + 1 : stop], labels[row, filled : stop - 1])
            labels[row, stop - 1] = next_tokens[k]
            _ask_ahead(
                segments, label_locations, segments[k, LENGTH] * label_locations[0][k, WIDTH]
            )
            problem = _label_segment(
                segments[k],
                shards[rows[k]],
                found[0][k],
                options[segments[k, STREAM]],
                labels[row, filled:stop],
            )
            if problem != FINE:
                return k, problem
            filled = stop + padding_behind(segments[k, LENGTH], options[0, MULTIPLE])
            labels[row, stop:filled] = IGNORED
            k += 1
        labels[row, filled:] = IGNORED
    return -1, FINE
