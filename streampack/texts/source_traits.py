"""Traits of a sample source that can be determined without iterating over it.

::

    list, map-style dataset          has_index, num_items
    generator                        is_one_shot
    Hugging Face, MosaicML Streaming recognized by class name, without an import

A source may reuse one list, array or dict for every item, so `own_copy` copies items that wait.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sized
from typing import Any, Protocol

import numpy as np

from streampack._extras import is_from
from streampack.errors import ConfigError

ATOMS = {int, float, bool, str, bytes, type(None)}
TABLES = {
    ("pandas", "DataFrame"): "table.to_dict('records')",
    ("polars", "DataFrame"): "table.to_dicts()",
    ("pyarrow", "Table"): "table.to_pylist()",
}
"""Tables that are iterated or indexed by column, and what gives their rows."""


class MapStyle(Protocol):
    """A data set with a length and an index, such as `ChatSamples`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def is_one_shot(source: object) -> bool:
    """Return whether a second iteration resumes where the first stopped, as with a generator.

    >>> is_one_shot([1]), is_one_shot(iter([1]))
    (False, True)
    """
    return isinstance(source, Iterator)


def check_not_table(source: object, argument: str) -> None:
    """Refuse a table that is iterated by column with a ConfigError that names its rows."""
    for (library, name), rows in TABLES.items():
        if is_from(source, library, name):
            raise ConfigError(
                f"{argument}=<{name}> is a table of {library}, and iterating over it yields "
                f"columns; pass its rows: {argument}={rows}"
            )


def as_array(value: Any) -> Any:
    """Return the values of a tensor as an array, and a scalar of either as a number.

    >>> as_array(np.int64(3)), as_array("a")
    (3, 'a')
    """
    if is_from(value, "torch", "Tensor"):
        value = np.asarray(value.detach().cpu())
    is_scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return value.item() if is_scalar else value


def num_items(source: object) -> int | None:
    """Return the number of items of a source over all slices; None if it is unknown.

    >>> num_items([5, 6]), num_items(iter([5, 6]))
    (2, None)
    """
    if not isinstance(source, Sized):
        return None
    try:
        # MosaicML's len() is the number for one rank, its `size` that for all ranks.
        return int(getattr(source, "size", len(source)) if is_mosaic(source) else len(source))
    except (TypeError, NotImplementedError):  # a __len__ that only some instances support
        return None


def is_mosaic(source: object) -> bool:
    """Return whether a source is a MosaicML `StreamingDataset`."""
    return is_from(source, "streaming", "StreamingDataset")


def is_hugging_face(source: object) -> bool:
    """Return whether a source is a Hugging Face iterable, which has a state and splits itself."""
    return is_from(source, "datasets", "IterableDataset")


def has_index(source: object) -> bool:
    """Return whether the items of a source can be read by index, in any order.

    >>> has_index([5, 6]), has_index(iter([5, 6])), has_index({"a": 5})
    (True, False, False)
    """
    is_plain = not (is_mosaic(source) or is_hugging_face(source) or isinstance(source, dict))
    is_torch_iterable = is_from(source, "torch", "IterableDataset")
    has = hasattr(source, "__getitem__") and num_items(source) is not None
    return is_plain and has and not is_torch_iterable


def supports_batched_getitem(source: object) -> bool:
    """Return whether a Hugging Face dataset reads several rows in little more time than one row.

    A transform may depend on the other rows, so a dataset with a transform is read row by row.
    """
    is_dataset = is_from(source, "datasets", "Dataset") and hasattr(source, "__getitems__")
    return is_dataset and getattr(source, "_format_type", "custom") in (None, "numpy")


def hugging_face_steps(source: object) -> list[Any]:
    """Return the steps of a Hugging Face iterable, from the last to its sources; else none."""
    inner = [getattr(source, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += getattr(source, "ex_iterables", ())
    return [step for one in inner if one is not None for step in (one, *hugging_face_steps(one))]


def has_unsaved_shuffle_buffer(source: object) -> bool:
    """Return whether a Hugging Face iterable has a shuffle buffer that its state omits."""
    return any("BufferShuffled" in type(step).__name__ for step in hugging_face_steps(source))


def own_copy(item: Any) -> Any:
    """Return a copy that shares no memory with objects that the source may reuse.

    Lists, tuples, dicts, arrays and tensors are copied recursively. Numbers and text are
    immutable. Objects of other classes are assumed to be new in every item.

    >>> row = {"tokens": [1, 2]}
    >>> kept = own_copy(row)
    >>> row["tokens"].append(3)
    >>> kept
    {'tokens': [1, 2]}
    """
    if type(item) in ATOMS:
        return item
    if isinstance(item, np.ndarray):
        # Elements of an object array may be reused too.
        return copy.deepcopy(item) if item.dtype.hasobject else item.copy()
    if isinstance(item, MutableMapping):
        made = copy.copy(item)
        for key, value in item.items():
            made[key] = own_copy(value)
        return made
    if isinstance(item, bytearray):
        return bytearray(item)
    if not isinstance(item, list | tuple):
        return item.detach().clone() if is_from(item, "torch", "Tensor") else item
    if set(map(type, item)) <= ATOMS:
        return copy.copy(item)
    values = [own_copy(each) for each in item]
    if isinstance(item, list):
        return values
    return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
