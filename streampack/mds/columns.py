"""Columns of MDS shards, and positions of their values, without decoding any value.

A shard of 2 samples with two columns of variable size, `source` before `tokens`::

    num_samples | offset 0 1 2 | config (JSON) | sample 0 .................... | sample 1 ...
        u32          u32 x 3                   ^ offset 0                      ^ offset 1
                                               | size size | source | head | tokens |
                                                 u32  u32             '-> ndim, shape (and dtype)

A sample's span is the byte of its first token and the number of its tokens.

Cost: about 100 ns a sample, with no Python loop; 16 bytes per sample and column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from streampack.errors import DataError, suggest
from streampack.mds.dtype_check import LIKELY, itemsize_of
from streampack.mds.index import MAX_SHARD_BYTES, Layout, Shard
from streampack.mds.litdata import LITDATA_BARE
from streampack.types import ByteArray, Int64Array, IntArray

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
"""Value types that fit in an int64; the only other MDS integer type is uint64."""
MAX_CONFIG_BYTES = 2**20
NO_TOKENS = (
    "none of its columns has token ids: rewrite the stream with token ids (`streampack "
    "write`), or iterate its text: IterableStream(streaming.StreamingDataset(...), "
    "tokenizer=..., text=...)"
)
DYNAMIC_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""dtype by the first byte of an `ndarray` value, if its column states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One integer column of a shard's layout."""

    name: str
    number: int
    dtype: str | None
    """The values' type, or None if each value states it in its first byte."""
    num_values: int | None = None
    """Values per sample if the shape is fixed, or None if each value states its shape or size."""
    has_shape: bool = False
    """Whether a value starts with its shape (not for `bytes` and fixed shapes)."""
    is_untyped: bool = False
    """Whether its encoding is `bytes`, which states no type, so that an option must."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Positions of one column's values in one shard."""

    begins: Int64Array
    """Byte offset in the shard of each sample's first value, shape (num_samples,)."""
    counts: Int64Array
    """Number of values per sample, shape (num_samples,)."""
    dtype: str
    """Type of the values: little-endian, at any alignment."""

    def read(self, data: ByteArray, sample: int) -> IntArray:
        """Return a copy of one sample's values, shape (counts[sample],).

        >>> spans = Spans(begins=np.array([1]), counts=np.array([2]), dtype="uint16")
        >>> spans.read(np.array([9, 1, 0, 2, 0], np.uint8), 0).tolist()
        [1, 2]
        """
        begin = int(self.begins[sample])
        num_bytes = int(self.counts[sample]) * np.dtype(self.dtype).itemsize
        values: IntArray = np.frombuffer(data[begin : begin + num_bytes].tobytes(), self.dtype)
        return values

    def take(self, samples: Int64Array) -> Spans:
        """Return the positions of these samples alone, shape (n,)."""
        return Spans(begins=self.begins[samples], counts=self.counts[samples], dtype=self.dtype)

    def edges(self, data: ByteArray) -> Int64Array:
        """Return each sample's first and last value, shape (num_samples, 2); -1 if it is empty."""
        some, itemsize = self.counts > 0, np.dtype(self.dtype).itemsize
        begins = self.begins[some]
        lasts = begins + (self.counts[some] - 1) * itemsize
        positions = np.stack([begins, lasts], axis=1)  # (n, 2)
        items = data[positions[:, :, None] + np.arange(itemsize)]  # (n, 2, itemsize)
        edges = np.full((len(some), 2), -1, np.int64)
        edges[some] = items.view(self.dtype)[:, :, 0]
        return edges


def token_names(tokens: str) -> tuple[str, ...]:
    """Return the columns that may have the token ids: the named one, or a default's also known one.

    >>> token_names("tokens"), token_names("ids")
    (('tokens', 'input_ids'), ('ids',))
    """
    return ("tokens", "input_ids") if tokens == "tokens" else (tokens,)


def find_column(
    layout: Layout, wanted: Sequence[str], dtype: str | None, where: str, option: str
) -> Column:
    """Find the first of the `wanted` columns that exists; refuse it unless it has integers.

    `dtype` is the type of its values if its encoding is `bytes`. For messages, `where` names the
    stream, and `option` the argument of `Stream` that names the column.
    """
    name = next(filter(layout.names.__contains__, wanted), None)
    if name is None:
        raise DataError(
            f"{where}: no column {' or '.join(map(repr, wanted))}; it has "
            f"{', '.join(map(repr, layout.names))}{suggest(wanted[0], layout.names)}; "
            f"{_way_to_integers(layout, option)}"
        )
    number = layout.names.index(name)
    encoding = layout.encodings[number]
    if encoding.partition(":")[0] == "ndarray":
        column = _ndarray_column(name, number, encoding, where)
    elif encoding != "bytes":
        raise DataError(
            f"{where}: column {name!r} is stored as {encoding!r} (column_encodings), but tokens, "
            "labels and masks must be 'ndarray:<dtype>', 'ndarray' or 'bytes'; "
            f"{_way_to_integers(layout, option)}"
        )
    elif dtype is None:
        option = option if option in ("labels", "loss_mask") else "tokens"
        raise DataError(
            f"{where}: column {name!r} is stored as 'bytes', which state no dtype; write "
            f"{option}='{name}:TYPE' with what it was written with, one of {', '.join(DTYPES)}: "
            "another one reads other values. Older scripts of LLM-Foundry write int64; newer ones "
            "state it"
        )
    else:
        column = Column(name=name, number=number, dtype=dtype, is_untyped=True)
    _check_dtype(column.dtype, name, encoding, where)
    size = None
    if column.num_values is not None and column.dtype is not None:
        size = column.num_values * np.dtype(column.dtype).itemsize
    if layout.sizes[number] != size:
        raise DataError(
            f"{where}: column {name!r} ({encoding}) has column_sizes {layout.sizes[number]}, but "
            f"must have {'null, as its values differ in size' if size is None else size}; "
            "write index.json again"
        )
    return column


def _way_to_integers(layout: Layout, option: str) -> str:
    columns = zip(layout.names, layout.encodings, strict=True)
    kinds = {name: encoding.split(":") for name, encoding in columns}
    fitting = [
        name
        for name, (kind, *dtype) in kinds.items()
        if kind == "bytes" or (kind == "ndarray" and (not dtype or dtype[0] in DTYPES))
    ]
    if fitting:
        return f"set {option}= to {' or '.join(map(repr, fitting))}"
    return f"omit {option}=" if option in ("labels", "loss_mask") else NO_TOKENS


def _ndarray_column(name: str, number: int, encoding: str, where: str) -> Column:
    _, _, stated = encoding.partition(":")
    dtype, _, shape = stated.partition(":")
    num_values = None
    if shape:
        sides = shape.split(",")
        if not all(side.isdecimal() and int(side) > 0 for side in sides):
            raise DataError(
                f"{where}: column {name!r}: {encoding!r} (column_encodings) has an invalid shape; "
                "write it as 'ndarray:<dtype>'"
            )
        num_values = prod(int(side) for side in sides)
    return Column(
        name=name, number=number, dtype=dtype or None, num_values=num_values, has_shape=not shape
    )


def _check_dtype(dtype: str | None, name: str, encoding: str, where: str) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise DataError(
            f"{where}: column {name!r} (column_encodings: {encoding!r}) has {dtype}, but must "
            f"have one of {', '.join(DTYPES)}; write the stream with integers"
        )


def check_layout(data: ByteArray, shard: Shard, where: str) -> None:
    """Refuse a shard if its config has other columns than index.json, or cannot be read.

    Costs about 20 µs, to parse one small JSON text. litData's chunks have no config.
    """
    if shard.layout.format != "mds":
        return
    fields = ("names", "encodings", "sizes")
    begin = 8 + 4 * shard.num_samples
    stated_samples, end = data[:8].view(np.uint32).tolist() if len(data) >= begin else (0, 0)
    # Invalid counts and offsets are refused by `sample_spans`; the config is optional.
    if stated_samples != shard.num_samples or not begin < end <= min(
        len(data), begin + MAX_CONFIG_BYTES
    ):
        return
    try:
        config = json.loads(data[begin:end].tobytes())
        stated = [tuple(config[f"column_{field}"]) for field in fields]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{where}: its config of {end - begin} bytes does not state its columns "
            f"({type(error).__name__}: {error}); the shard is damaged: if it is a cached copy, "
            "delete it, else rewrite the stream"
        ) from error
    for field, theirs in zip(fields, stated, strict=True):
        ours = getattr(shard.layout, field)
        if ours != theirs:
            raise DataError(
                f"{where}: column_{field} is {list(theirs)} in the shard, but index.json says "
                f"{list(ours)}; they do not belong together: fetch or write both again"
            )


def sample_spans(
    data: ByteArray, num_samples: int, layout: Layout, column: Column, where: str
) -> Spans:
    """Find the values of one column, from `find_column`, in the bytes of a raw shard.

    Header, sizes and values that do not fit each other are a DataError.
    """
    # litData's chunks differ in two ways: one has no sizes of columns, and arrays have no shapes.
    offsets = sample_offsets(data, num_samples, where)
    if layout.format == LITDATA_BARE:
        begins, sizes = offsets[:-1], np.diff(offsets)
    else:
        begins, sizes = _value_spans(data, offsets, layout, column, where)
    dtype = column.dtype
    if dtype is None:
        dtype = _dynamic_dtype(data, begins, sizes, column, where)
        begins, sizes = begins + 1, sizes - 1
    itemsize = np.dtype(dtype).itemsize
    if column.has_shape and layout.format == "mds":
        num_values, head_bytes = _stated_shapes(data, begins, sizes, where)
        begins, sizes = begins + head_bytes, sizes - head_bytes
    elif column.num_values is not None:
        num_values = np.full(num_samples, column.num_values, np.int64)
    else:
        num_values = sizes // itemsize
    misfits = num_values * itemsize != sizes
    if misfits.any():
        likely = LIKELY[itemsize_of(sizes)]
        hint = (  # the requested dtype may be wrong
            f" (if that is not how it was written, set its type: '{column.name}:{likely}' by the "
            "sizes of all samples)"
        ) * column.is_untyped
        i = int(misfits.argmax())
        problem = f"{sizes[i]} bytes of values, which are not {num_values[i]} x {dtype}{hint}"
        raise _damaged(where, i, f"column {column.name!r} has {problem}")
    return Spans(begins=begins, counts=num_values, dtype=dtype)


def sample_values(data: ByteArray, sample: int, layout: Layout) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, encoding and value of each column of a sample, from a raw shard of MDS."""
    words = np.dtype("<u4")
    at = int(np.frombuffer(data[4 + 4 * sample : 8 + 4 * sample].tobytes(), words)[0])
    stated = np.frombuffer(data[at : at + 4 * layout.num_variable].tobytes(), words).tolist()
    at += 4 * layout.num_variable
    for name, encoding, fixed in zip(layout.names, layout.encodings, layout.sizes, strict=True):
        size = stated.pop(0) if fixed is None else fixed
        yield name, encoding, data[at : at + size].tobytes()
        at += size


def plain_value(encoding: str, value: bytes, errors: str = "strict") -> Any:
    """Return a value of a column; bytes where its encoding is not a plain one.

    A ValueError says that it cannot be decoded; `errors` are those of UTF-8.

    >>> plain_value("str", b"a"), plain_value("int", bytes(8)), plain_value("bytes", b"a")
    ('a', 0, b'a')
    """
    if encoding == "str":
        return value.decode("utf-8", errors)
    if encoding == "json":
        return json.loads(value)
    try:
        return np.frombuffer(value, "int64" if encoding == "int" else encoding)[0].item()
    except (TypeError, ValueError, IndexError):
        return value


def _damaged(where: str, sample: int, problem: str) -> DataError:
    return DataError(
        f"{where}, sample {sample} of the shard: {problem}; the shard is damaged: "
        "if it is a cached copy, delete it, else rewrite the stream"
    )


def sample_offsets(data: ByteArray, num_samples: int, where: str) -> Int64Array:
    """Return the first byte of each sample of a raw shard, and the end; shape (num_samples + 1,).

    Raises:
        DataError: If its header does not say `num_samples`, or does not fit its bytes.
    """
    head_bytes = 8 + 4 * num_samples
    stated = int(data[:4].view(np.uint32)[0]) if len(data) >= 8 else -1
    if stated != num_samples or len(data) < head_bytes:
        raise DataError(
            f"{where}: the shard of {len(data)} bytes says it has {stated} samples, but "
            f"index.json says {num_samples}; they do not belong together: fetch or write both again"
        )
    offsets = data[4:head_bytes].view(np.uint32).astype(np.int64)  # (num_samples + 1,)
    if offsets[0] < head_bytes or offsets[-1] != len(data):
        raise DataError(
            f"{where}: samples take bytes {offsets[0]} to {offsets[-1]}, but the shard has space "
            f"for them in {head_bytes} to {len(data)}; fetch or rewrite it"
        )
    if (bad := np.diff(offsets) < 0).any():
        i = int(bad.argmax())
        raise _damaged(where, i, f"it ends {offsets[i + 1]} before it begins")
    return offsets


def _value_spans(
    data: ByteArray, offsets: Int64Array, layout: Layout, column: Column, where: str
) -> tuple[Int64Array, Int64Array]:
    lengths = np.diff(offsets)
    num_variable = layout.num_variable
    sizes = np.zeros((len(lengths), len(layout.sizes)), np.int64)  # (num_samples, num_columns)
    # Of samples that are too short, these are other bytes, and the sum below is not theirs.
    spans = data.take(offsets[:-1, None] + np.arange(4 * num_variable), mode="clip")
    fixed = np.array([-1 if size is None else size for size in layout.sizes])
    sizes[:] = fixed
    sizes[:, fixed < 0] = spans.view(np.uint32).reshape(len(lengths), num_variable)
    total = 4 * num_variable + sizes.sum(axis=1)
    if (bad := total != lengths).any():
        i = int(bad.argmax())
        raise _damaged(where, i, f"{lengths[i]} bytes, but its columns add up to {total[i]}")
    begins = offsets[:-1] + 4 * num_variable + sizes[:, : column.number].sum(axis=1)
    return begins, sizes[:, column.number]


def _dynamic_dtype(
    data: ByteArray, begins: Int64Array, sizes: Int64Array, column: Column, where: str
) -> str:
    if (bad := sizes < 1).any():
        i = int(bad.argmax())
        raise _damaged(where, i, f"column {column.name!r} has {sizes[i]} bytes and no dtype")
    codes = np.unique(data[begins])
    names = [DYNAMIC_DTYPES.get(int(code), f"unknown ({code})") for code in codes]
    if len(names) > 1:
        raise DataError(
            f"{where}: column {column.name!r} mixes {', '.join(names)} in one shard; "
            "write it with one dtype, e.g. as 'ndarray:int32'"
        )
    dtype = names[0] if names else "int32"
    _check_dtype(dtype, column.name, "ndarray", where)
    return dtype


def _stated_shapes(
    data: ByteArray, begins: Int64Array, sizes: Int64Array, where: str
) -> tuple[Int64Array, Int64Array]:
    # The number of axes << 2 | log2(bytes per axis); of an empty value, another byte.
    kinds = data.take(begins, mode="clip")
    head_bytes = 1 + (kinds.astype(np.int64) >> 2 << (kinds & 3))
    if (bad := sizes < head_bytes).any():
        i = int(bad.argmax())
        raise _damaged(where, i, f"a value of {sizes[i]} bytes has a shape of {head_bytes[i]}")
    num_values = np.ones(len(begins), np.int64)
    for kind in np.unique(kinds):  # almost always two or three
        of_kind = kinds == kind
        axis_bytes, num_axes = 1 << (kind & 3), kind >> 2
        spans = data[begins[of_kind, None] + 1 + np.arange(int(num_axes) * int(axis_bytes))]
        shapes = spans.view(f"u{axis_bytes}").reshape(len(spans), int(num_axes))
        # In floats, so that a product of corrupt sides cannot wrap around to the right number.
        products = shapes.astype(np.float64).prod(axis=1)
        num_values[of_kind] = np.minimum(products, MAX_SHARD_BYTES).astype(np.int64)
    return num_values, head_bytes
